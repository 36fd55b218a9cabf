"""The modules that are compiled: their structure, and how their weights and parts are exchanged."""
