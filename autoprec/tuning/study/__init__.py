"""tuning/study."""
