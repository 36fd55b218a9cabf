"""A fleet of headless ComfyUI processes behind one address, on Ray Serve. `scripts/fleet` starts it; docs/fleet.md.

A prompt's way, from the top down:

1. `ingress`: an HTTP request in ComfyUI's own form (`http_form`). `records` keeps its id, `need` makes digests of
   what it will use. `warm_ups` sends one workflow to several replicas.
2. `prompts`: one call of a replica for each prompt, open until it ends; it runs again if the replica is lost.
3. `router`: Serve's router for that call. `ranking` orders the replicas by what each has ready.
4. `replica`: passes the prompt to its own ComfyUI (`replica_server`, `comfyui_client`), and reports what is ready.

Only `router`, `replica`, `ingress`, `prompts` and `application` import Ray; `command` starts it (`ray_start`). The
pack itself never does.
"""
