"""From clips and captions to samples: decode (clips, video_io), encode once (precompute), read in a reproducible order (dataset)."""
