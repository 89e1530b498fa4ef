"""The job that is planned: network, plan, counts, stages."""
