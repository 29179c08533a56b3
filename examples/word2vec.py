"""Word vectors from Python's own manual: skip-gram with negative sampling.

    python examples/word2vec.py

The two tables have a row per word, and a batch touches only some of the rows: the use case for sparse gradients.
SparseAdam steps as torch.optim.SparseAdam does, only faster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from rowstep import SparseAdam

WINDOW = 4
LOOK_UP = ("list", "exception", "import", "true", "async")


class SkipGram(nn.Module):
    def __init__(self, words: int, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, sparse=True)
        self.contexts = nn.Embedding(words, width, sparse=True)
        for table in (self.words, self.contexts):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, words: Tensor, contexts: Tensor) -> Tensor:
        """How well each word goes with its context."""
        fit: Tensor = (self.words(words) * self.contexts(contexts)).sum(-1)
        return fit


def manual() -> tuple[list[str], Tensor]:
    """The vocabulary, and the text as positions in it."""
    # Chapters repeat each other's paragraphs. Pairs from such a paragraph would be both learned and held out.
    paragraphs = dict.fromkeys(part for topic in topics.values() for part in re.split(r"\n\s*\n", topic))
    text = re.findall(r"[a-z]{2,}", " ".join(paragraphs).lower())
    vocabulary = [word for word, count in Counter(text).most_common() if count >= 8]
    position = {word: i for i, word in enumerate(vocabulary)}
    return vocabulary, torch.tensor([position[word] for word in text if word in position])


def pairs(text: Tensor) -> Tensor:
    """(word, context) for all words up to WINDOW apart, without most of the pairs with a very frequent word."""
    both = torch.cat([torch.stack([text[:-d], text[d:]], 1) for d in range(1, WINDOW + 1)])
    both = torch.cat([both, both.flip(1)])
    share = text.bincount() / len(text)
    keep = (1e-3 / share).sqrt().clamp(max=1)
    return both[torch.rand(len(both)) < keep[both].prod(1)]


def batches(data: Tensor, noise: Tensor, size: int = 2048) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Words, their contexts, and words drawn as what the context is not."""
    for batch in torch.split(data[torch.randperm(len(data))], size):
        yield batch[:, 0], batch[:, 1], torch.multinomial(noise, len(batch), replacement=True)


@torch.no_grad()
def accuracy(model: SkipGram, data: Tensor, noise: Tensor) -> float:
    """How often the true context of a word is told from a drawn one; 50% is guessing."""
    wins = [torch.sign(model(word, true) - model(word, drawn)) for word, true, drawn in batches(data, noise)]
    return (torch.cat(wins).mean().item() + 1) / 2


def main(epochs: int = 8) -> tuple[float, float]:
    """Train; return the accuracy on the tenth of the pairs that is held out, before and after."""
    torch.manual_seed(0)
    vocabulary, text = manual()
    noise = text.bincount(minlength=len(vocabulary)) ** 0.75
    data = pairs(text)
    data = data[torch.randperm(len(data))]
    test, train = data[: len(data) // 10], data[len(data) // 10 :]
    model = SkipGram(len(vocabulary))
    log_sigmoid = nn.LogSigmoid()
    optimizer = SparseAdam(model.parameters(), lr=0.01)
    before = after = accuracy(model, test, noise)
    print(f"{len(text):,} words of text, {len(vocabulary):,} different, {len(train):,} pairs")
    for epoch in range(1, epochs + 1):
        for word, true, drawn in batches(train, noise):
            optimizer.zero_grad()
            loss = -(log_sigmoid(model(word, true)) + log_sigmoid(-model(word, drawn))).mean()
            loss.backward()
            optimizer.step()
        after = accuracy(model, test, noise)
        print(f"  epoch {epoch:2}: {after:.1%} of unseen contexts told from drawn ones")
    unit = nn.functional.normalize(model.words.weight.detach(), dim=1)
    for name in filter(vocabulary.__contains__, LOOK_UP):
        nearest = (unit @ unit[vocabulary.index(name)]).topk(6).indices[1:].tolist()
        print(f"  {name}: {', '.join(vocabulary[i] for i in nearest)}")
    return before, after


if __name__ == "__main__":
    main()
