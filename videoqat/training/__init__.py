"""Training: objective, optimiser, state on disk, health of the quantisation, the loop, and export."""
