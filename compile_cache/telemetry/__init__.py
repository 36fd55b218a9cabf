"""What happened, for people and routes: counters, time lines, estimates, and reasons in words."""
