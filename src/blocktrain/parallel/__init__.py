"""Several processes: data parallel, pipeline, FSDP2."""
