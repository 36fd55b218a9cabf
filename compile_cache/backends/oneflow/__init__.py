"""The OneFlow backend. Only this folder imports oneflow, and only after a prompt has used the backend."""
