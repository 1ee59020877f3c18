"""What answers are judged by: the law that draws must follow, and tests with bounds on false alarms."""
