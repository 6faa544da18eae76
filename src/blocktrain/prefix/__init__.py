"""The prefix cache: run the frozen prefix once, store what it puts out, and train on that (paper 3.2.2)."""
