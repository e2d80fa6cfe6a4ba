"""Which language the next example comes from: temperature sampling.

A language of n_l training examples is drawn with probability p_l proportional to n_l ** (1/T).
T=1 keeps the proportions of the data, a large T makes all languages equal. Section 4.1 speaks of
the imbalance alone; T=5 is that of the work it builds on (Arivazhagan et al. 2019).
"""

import dataclasses
from collections.abc import Sequence

import grain.python as grain
import numpy as np

from lingvo_gshard.input import manifest, records

# An endless mixture stands over languages that repeat; None is Grain's endless repeat.
_ENDLESS = None


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """Which examples, in which order.

    `languages` None means all that have examples in `split`. With `repeat` the stream is endless
    and mixed by `temperature`; without, every example appears once, language after language, and
    `shuffle` shuffles the whole.
    """

    split: str
    languages: tuple[str, ...] | None
    temperature: float
    shuffle: bool
    repeat: bool
    seed: int


def temperature_weights(counts: Sequence[int], temperature: float) -> np.ndarray:
    """Returns the sampling probabilities p_l, float64 [len(counts)], which sum to 1.

    Raises:
        ValueError: a temperature below 1, or a language without examples.
    """
    if temperature < 1:
        raise ValueError(f"temperature {temperature}: expected at least 1")
    if not counts or min(counts) < 1:
        raise ValueError(f"example counts {list(counts)}: expected at least 1 of each language")
    weights = np.asarray(counts, np.float64) ** (1 / temperature)
    return weights / weights.sum()


def languages_of(data: manifest.Manifest, config: MixtureConfig) -> tuple[manifest.Language, ...]:
    """The languages of a mixture. Raises ValueError for one without examples in the split."""
    if config.split not in manifest.SPLITS:
        raise ValueError(f"split {config.split!r}: expected one of {', '.join(manifest.SPLITS)}")
    if config.languages is None:
        found = tuple(lang for lang in data.languages if lang.num_examples(config.split))
    else:
        found = tuple(data.language(code) for code in config.languages)
    if not found:
        raise ValueError(f"no language has examples in split {config.split!r}")
    for language in found:
        if not language.num_examples(config.split):
            raise ValueError(f"language {language.code} has no examples in split {config.split!r}")
    return found


def examples(data_dir: str, data: manifest.Manifest, config: MixtureConfig) -> grain.MapDataset:
    """Returns the stream as a Grain dataset of `example_codec.Example` by index.

    Example i is a function of the config and i alone, so that a position is all it takes to resume.
    """
    languages = languages_of(data, config)
    sources = [
        grain.MapDataset.source(records.RecordSource(data_dir, lang.records[config.split]))
        for lang in languages
    ]
    if not config.repeat:
        whole = grain.MapDataset.concatenate(sources)
        return whole.shuffle(seed=_seed(config.seed, 0)) if config.shuffle else whole
    if config.shuffle:
        sources = [
            source.shuffle(seed=_seed(config.seed, index)) for index, source in enumerate(sources)
        ]
    counts = [lang.num_examples(config.split) for lang in languages]
    weights = temperature_weights(counts, config.temperature)
    return grain.MapDataset.mix([source.repeat(_ENDLESS) for source in sources], weights.tolist())


def _seed(seed: int, index: int) -> int:
    # Languages of equal size must not be shuffled alike: their English may be the same.
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint32)[0])
