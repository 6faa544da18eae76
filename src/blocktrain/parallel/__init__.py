"""Several processes: data parallel, pipeline, FSDP2, local SGD."""
