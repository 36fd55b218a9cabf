"""The OneFlow backend. Only this folder imports oneflow or onediff, and only after a prompt has used the backend."""
