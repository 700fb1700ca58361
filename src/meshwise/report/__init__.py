"""What a person reads: progress, summaries, verdicts."""
