"""Tables and figures of README.md and docs/, rendered from the committed records in results/: python results/render"""
