"""The decoder of lines of text for each kind of model."""

from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.generator import Generator
from lingvo_gshard.decoding.text_decoder import TextDecoder
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.tokenizer import Tokenizer

_CLASSES: dict[str, type[TextDecoder]] = {Kind.PARALLEL: Translator, Kind.TEXT: Generator}


def text_decoder(decoder: Decoder, source: Tokenizer, target: Tokenizer) -> TextDecoder:
    """Returns a Translator or a Generator, by the kind of the decoder's model."""
    return _CLASSES[decoder.spec.kind](decoder, source, target)
