"""Serves translations or continuations over HTTP, with a page to type in, for many people.

    gshard serve --bundle=DIR --port=8080

POST /translate takes lines and, of a language model, POST /generate prompts; /openapi.json
describes both. The target is English; if the data was prepared with other directions, requests
choose it by target_lang, and models with tokens of languages need source_lang, too. SIGHUP loads a
bundle again.
"""

import importlib.util

from absl import flags

from lingvo_gshard import cli, decoder_flags

_PORT = flags.DEFINE_integer("port", 8080, "The port; 0 chooses a free one.", 0, 65535)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "The address to listen on.")
_CLIENT_HEADER = flags.DEFINE_string("client_header", None, "Set by a proxy: names the client.")
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(decoder_flags)


def main() -> None:
    """Serves until it is stopped; raises ValueError for a user's mistake."""
    decoder_flags.check()
    if cli.processes():
        raise ValueError("one process serves; start it without the others.")

    # The server's packages are optional.
    for package in ("aiohttp", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"serving needs {package}: pip install 'lingvo_gshard[serve]', or -r "
                "requirements/serve.txt."
            )

    from lingvo_gshard.serving import connection

    # Before the model is loaded, which may take a minute.
    connection.listen(_HOST.value, _PORT.value).close()

    with decoder_flags.text_decoder() as text_decoder:
        from lingvo_gshard.serving import app

        # A run has no bundle to load again.
        load = decoder_flags.reloaded if decoder_flags.BUNDLE.value else None
        app.serve(
            text_decoder, _HOST.value, _PORT.value, load=load, client_header=_CLIENT_HEADER.value
        )


if __name__ == "__main__":
    cli.run("serve", main, unused=cli.OF_PROCESSES)
