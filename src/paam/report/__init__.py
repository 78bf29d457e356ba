"""Views of a run's record. They read events and nothing else."""
