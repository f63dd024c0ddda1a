"""Text → tokens → batches: the corpus, the tokenizers, and a sampler whose batch is a pure function of (seed, step).

The default corpus, the State of the Union addresses 1790–2022, travels with the package: no download, no login.
"""

from onelag.data.corpus import Corpus, load_corpus
from onelag.data.sampler import Sampler, validation_batches
from onelag.data.source import DataSource, load_source

__all__ = ["Corpus", "DataSource", "Sampler", "load_corpus", "load_source", "validation_batches"]
