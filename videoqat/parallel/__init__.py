"""Many processes for one model: the mesh, sequence parallelism (Ulysses), sharding (FSDP2), activation checkpointing."""
