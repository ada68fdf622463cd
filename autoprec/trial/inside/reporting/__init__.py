"""What leaves a trial: metrics that its script reports, and how it ended."""
