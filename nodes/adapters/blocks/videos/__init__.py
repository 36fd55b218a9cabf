"""Video VAEs: one file for each way in which their blocks carry frames from call to call; `vaes` lists them."""
