"""Decoders of videos: one file for each way in which they carry frames from call to call, listed in `known`."""
