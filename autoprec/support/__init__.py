"""What every room needs and no other library gives: atomic files, bounded YAML, hidden secrets, optional packages."""
