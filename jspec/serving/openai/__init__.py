"""``jspec serve``: an HTTP server that speaks OpenAI's protocol, with vLLM's additions to it.

Only ``command`` may be imported without the packages of ``jspec[serve]``.
"""
