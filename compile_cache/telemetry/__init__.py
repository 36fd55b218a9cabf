"""Counters, time lines, estimates, and reasons in words, for people and routes."""
