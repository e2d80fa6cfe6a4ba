"""What XLA's compilers make of a run's programs: memory, roofline, categories, what looks wrong."""
