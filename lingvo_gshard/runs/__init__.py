"""What a run's folder is: its launch record, its modes, its kept bundle."""
