"""The steps as lists of stages: sampling, probabilities, verification, and the schedule that they follow."""
