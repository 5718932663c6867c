"""A small GPT that learns to write Python from the source of Python's standard library, which every machine has.

    phalanx run --nproc-per-node 2 examples/gpt.py --steps 200
    python examples/gpt.py --steps 200

It shows mixed precision, gradient accumulation, clipping, and where to save a checkpoint.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import phalanx as px


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of the optimizer")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank, at once")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    with px.init(seed=0) as world:
        data = Source(args.context)
        model = GPT(len(data.characters), args.context, args.width, args.layers).to(world.device)
        px.print(f"{len(data):,} starting positions, {sum(p.numel() for p in model.parameters()):,} parameters")
        wrapped = px.data_parallel(model)
        fit(world, wrapped, data, args)
        px.print(sample(model, data, "def ", 80, world))


class Source(Dataset):
    """One sample for each position in the text of the standard library's top-level modules: the text from there."""

    def __init__(self, context: int, characters: int = 1_000_000) -> None:
        directory = Path(sysconfig.get_paths()["stdlib"])
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(directory.glob("*.py"))]
        text = "".join(character for character in "\n".join(texts)[:characters] if character.isascii())
        self.characters = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.characters)}
        self._text = torch.tensor([codes[character] for character in text])
        self._context = context

    def __len__(self) -> int:
        return len(self._text) - self._context

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        piece = self._text[position : position + self._context + 1]
        return piece[:-1], piece[1:]

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.characters.index(character) for character in text])

    def decode(self, codes: Tensor) -> str:
        return "".join(self.characters[code] for code in codes.tolist())


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, codes: Tensor) -> Tensor:
        positions = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.last(self.blocks(self.characters(codes) + self.positions(positions))))


def fit(world: px.World, model: nn.Module, data: Source, args: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=px.ShardSampler(data))
    parts, amp = px.accumulate(model, every=args.accumulate), px.autocast()
    last, done = px.Mean(), 0
    for codes, following in px.track(loader, epoch=0, device=world.device):
        with parts:
            with amp:
                loss = functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())
            amp.backward(loss / parts.size)
        px.log(loss=loss)
        if not parts.complete:
            continue
        amp.clip(optimizer, max_norm=1.0)
        amp.step(optimizer)
        optimizer.zero_grad()
        last.reset()
        last.update(loss)
        done += 1
        # Save a checkpoint of model, optimizer and sampler here.
        if done == args.steps:
            break
    value = last.compute()  # a collective: every rank must call it
    px.print(f"{done} steps, loss of the last batch {value:.3f}")


def sample(model: GPT, data: Source, beginning: str, length: int, world: px.World) -> str:
    """Returns ``beginning`` and what the model writes after it, always the likeliest character."""
    codes = data.encode(beginning).to(world.device)
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            scores = model(codes[None, -model.context :])[0, -1]
            codes = torch.cat([codes, scores.argmax()[None]])
    return data.decode(codes)


if __name__ == "__main__":
    main()
