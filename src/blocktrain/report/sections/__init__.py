"""The sections of the page, a file each; `registry.py` lists them in order."""
