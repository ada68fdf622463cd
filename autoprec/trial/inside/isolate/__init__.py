"""What keeps a trial apart from everything else: the user's files, and the randomness of other trials.

Writes go to a private layer that the trial can read back, and every fork starts from the same random state.
"""
