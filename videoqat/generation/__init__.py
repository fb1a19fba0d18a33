"""One video from one prompt, with timings by stage and a receipt of what really ran."""
