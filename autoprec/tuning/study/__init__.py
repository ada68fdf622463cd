"""A study on disk: records as plain data, the Optuna storage that holds them, and names that are free."""
