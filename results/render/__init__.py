"""Tables and figures of README.md and docs/, drawn from the records committed under results/: python results/render"""
