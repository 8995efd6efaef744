"""``jspec serve``: the server of a model, with OpenAI's and Anthropic's endpoints.

Only ``command`` may be imported without the packages of ``jspec[serve]``.

command.py       options of ``jspec serve``, and the choice between one process and a supervisor
served_model.py  the model and its service from these options
lifecycle.py     start, serving and graceful shutdown
app.py           routes
rl_routes.py     vLLM's routes for a trainer, behind an option
middleware.py    authentication, draining and error responses
metrics.py       ``/metrics``
page.py          the page at ``/``, page.html
"""
