"""`onelag download`: documents → tokens → shards, once. Interrupt it at any time; the same command goes on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onelag.data.documents import documents_of, tokenizer_by_name
from onelag.data.shards import Manifest, ShardWriter, verify_shards

BATCH = 256  # documents per call of the tokenizer, which spreads them over the cores


@dataclass(frozen=True)
class DownloadCommand:
    """Fetch and tokenize the data of the cluster tier into memory-mapped shards, or do the same with your own text. Resumes where it was stopped."""

    source: tyro.conf.Positional[str] = "fineweb-edu"
    """fineweb-edu, or a .txt or .jsonl file, or a folder of them"""
    output: Path = Path("data/fineweb-edu")
    """folder of the shards; give it as data.corpus"""
    tokenizer: str = "HuggingFaceTB/SmolLM2-135M"
    """name on the Hugging Face hub, path of a tokenizer.json, or bytes"""
    tokens: int = 2_700_000_000
    """stop after so many; the 135M run needs 2.7e9, 360M 7.2e9, the 2B mixture 40e9, the 10B one 200e9"""
    shard_tokens: int = 100_000_000
    """tokens per file; what an interruption costs at most"""
    hold_out_every: int = 500
    """every so many-th document is kept for validation"""
    verify: bool = False
    """only read all shards that are there and compare their checksums"""

    def run(self) -> None:
        console = Console()
        if self.verify:
            count = 0
            for shard in verify_shards(self.output):
                count += 1
                console.print(f"{shard.file}: {shard.tokens:,} tokens, right")
            console.print(f"all {count} shards of {self.output} are right")
            return
        with _progress(console) as bar:
            task = bar.add_task("tokens", total=self.tokens, documents="")
            manifest = prepare(self, lambda tokens, documents: bar.update(task, completed=min(tokens, self.tokens), documents=f"{documents:,} documents"))
        console.print(
            f"{self.output}: {manifest.tokens('train'):,} tokens to train, {manifest.tokens('held-out'):,} held out, in {len(manifest.shards)} shards "
            f"from {manifest.documents:,} documents. Use it with --data.corpus {self.output} --data.tokenizer {self.tokenizer}"
        )


def prepare(settings: DownloadCommand, report: Callable[[int, int], None] = lambda tokens, documents: None) -> Manifest:
    """Fills the folder until it holds `settings.tokens` or the source ends; what is there already is kept.

    Args:
        report: called with (tokens, documents) so far.

    Raises:
        ValueError: see `documents_of`, `HubTokenizer`; a setting out of range.
        ShardError: the folder holds something else.
    """
    for name in ("tokens", "shard_tokens"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name}={getattr(settings, name)}: use 1 or more")
    if settings.hold_out_every < 2:
        raise ValueError(f"hold_out_every={settings.hold_out_every}: use 2 or more, or nothing is left to train on")
    tokenizer = tokenizer_by_name(settings.tokenizer)
    manifest = Manifest(
        source=settings.source,
        tokenizer=settings.tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
        hold_out_every=settings.hold_out_every,
    )
    writer = ShardWriter(settings.output, manifest, settings.shard_tokens)
    report(writer.tokens, writer.documents)
    # Asked for more than the last time: a complete folder goes on too.
    if writer.tokens < settings.tokens:
        for batch in _batches(documents_of(settings.source, skip=writer.documents), BATCH):
            for tokens in tokenizer.encode_each(batch):
                writer.add(tokens)
                if writer.tokens >= settings.tokens:
                    break
            report(writer.tokens, writer.documents)
            if writer.tokens >= settings.tokens:
                break
    writer.commit(complete=True)
    return writer.manifest


def _batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, size)):
        yield batch


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[documents]}"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
