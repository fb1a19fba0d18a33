"""What 4-bit attention costs in quality and saves in time: paired videos, paired losses, one report."""
