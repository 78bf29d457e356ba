"""Random networks as a test: generated as Python source, pruned at random, and checked against themselves."""
