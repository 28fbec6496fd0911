"""Each task's network as the estimate of memory sees it, with the longest samples that a micro-batch may have.

What preparation learns of the data is not known before it; `expected` says what the settings know of that. The number of
labels hardly matters. Sentences of a translator are as long as the context on both sides, or share a bundle evenly.

    network = network_of(config, expected(config), slots=2, arithmetic=Arithmetic())     # None: it cannot be told
    network.count                                             # parameters
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raystride.model.shape import convnet_layers, is_tied, pooled_width, post_norm, window_sizes
from raystride.pipelines.config import Config
from raystride.pipelines.config.model import Model
from raystride.pipelines.memory.activations import FP32, Arithmetic, BlockMemory, Moment, Network, PartMemory
from raystride.pipelines.memory.cut import NetworkPart
from raystride.pipelines.memory.saved import Saved, attention_sizes, cross_sizes, feed_forward_sizes, norm_sizes

WHOLE = NetworkPart()
Facts = Mapping[str, Any]
"""What a task knows of prepared data; see `raystride.pipelines.tasks.task`."""
LABELS = 10
"""How many labels are expected."""
_CHUNKS, _SMALLEST_CHUNK, _ALIGNMENT = 8, 1024, 64
"""As `raystride.triton_kernels.linear_cross_entropy` has them, which cannot be imported where there is no PyTorch."""
_CAPPED = 1024
"""As `raystride.model.loss` has it."""
_PLACE = 8
"""Bytes of the place where max-pooling found a number."""


def expected(config: Config) -> Facts:
    """The facts as far as settings tell them."""
    words = config.tokenizer.vocabulary_size
    image = {"image": config.data.image_size} if config.task == "images" else {}
    return {"vocabulary_size": words, "target_vocabulary_size": words, "labels": range(LABELS), **image}


def network_of(
    config: Config, facts: Facts, *, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE
) -> Network | None:
    """The network with so many slots; None of a task that is not ours, and of images whose size is not known.

    Of a `part`, settings and facts are those that `cut` gives.
    """
    build = NETWORKS.get(config.task)
    return build(config, facts, slots, arithmetic, part) if build else None


def decoder(config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE) -> Network:
    """The network of language modelling, of completion and of preference, with so many slots in a micro-batch."""
    shape, words = config.model, int(facts["vocabulary_size"])
    saved = Saved(shape, arithmetic, _tokens(config, slots) // part.context, shared=part.tensor)
    head = words * shape.width
    # Where one backward comes through both uses of a tied embedding.
    tied, own_head = is_tied(shape) and not part.stages, part.last and not (is_tied(shape) and part.first)
    sizes = _embedding_sizes(shape, words) if part.first else []
    sizes += shape.layers * _block_sizes(shape)
    sizes += _final_sizes(shape) if part.last else []
    sizes += [head] if own_head else []
    ending = max(saved.stream, saved.gathered) + 2 * FP32 * head * tied
    return Network(
        sizes=sizes,
        blocks=[saved.block()] * shape.layers,
        front=saved.embedded if part.first else 0.0,
        loss=_loss_of_words(saved, words, tied=tied) if part.last else [],
        ending=Moment(ending, sum(sizes), head * part.first, "embedding", shape.layers),
        head=head * own_head,
        waiting=FP32 * head * tied,
    )


def classifier(config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE) -> Network:
    """The network of classification of texts, with so many slots in a micro-batch."""
    shape, words, labels = config.model, int(facts["vocabulary_size"]), len(facts["labels"])
    saved = Saved(shape, arithmetic, _tokens(config, slots), padded=True, shared=part.tensor)
    head, windows = [labels * pooled_width(shape), labels], _windows(saved, shape)
    blocks = [saved.block()] * shape.layers + windows
    # A parameter of the model itself comes before those of its modules.
    sizes = [shape.width] * (shape.pooling == "attention") + _embedding_sizes(shape, words)
    sizes += shape.layers * _block_sizes(shape) + _final_sizes(shape) + window_sizes(shape) + head
    return Network(
        sizes=sizes,
        blocks=blocks,
        front=saved.embedded,
        loss=[Moment(0.0 if windows else saved.final + 2 * saved.stream, sum(head))],
        ending=Moment(max(saved.stream, saved.gathered), sum(sizes), words * shape.width, "embedding", len(blocks)),
        head=sum(head),
    )


def _windows(saved: Saved, shape: Model) -> list[BlockMemory]:
    """The blocks of pooling by windows; in their backward the last comes first, and what the final norm saves
    waits so long.
    """
    if shape.pooling != "windows":
        return []
    numbers, last = saved.tokens * saved.arithmetic.product, len(shape.windows) - 1
    blocks = []
    for each, size in enumerate(shape.windows):
        seen, found = size * shape.width, shape.window_channels
        part = PartMemory(numbers * (seen + found), numbers * seen, (seen + 1) * found, seen * found)
        norm = 0.0 if each or post_norm(shape) else saved.final
        gradient = saved.stream if each < last else 0.0
        blocks.append(
            BlockMemory(0.0 if each else saved.stream, numbers * found, (part,), gradient, seen * found, beside=norm)
        )
    return blocks


def translator(config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE) -> Network:
    """The network of translation: the encoder's blocks, then the decoder's."""
    shape, words = config.model, int(facts["vocabulary_size"])
    encoders, shared = shape.encoder_layers or shape.layers, config.tokenizer.shared
    targets = words if shared else int(facts["target_vocabulary_size"])
    tokens = _tokens(config, slots, sides=2)
    saved, target = (Saved(shape, arithmetic, tokens, padded=side == 0, shared=part.tensor) for side in range(2))
    last = replace(saved.block(), beside=saved.final + saved.embedded)
    block = target.target_block(tokens)
    head, positions = targets * shape.width, _embedding_sizes(shape, words)[1:]
    sizes = [words * shape.width] + ([] if shared else [head]) + 2 * positions
    sizes += encoders * _block_sizes(shape) + _final_sizes(shape)
    sizes += shape.layers * (attention_sizes(shape) + cross_sizes(shape) + feed_forward_sizes(shape)) + _final_sizes(shape)
    # The target embedding's gradient is added to the head's, into new memory.
    embedded = PartMemory(0.0, FP32 * head * (1 + shared), 0, 0 if shared else head)
    first = replace(block, parts=(*block.parts, embedded))
    blocks = [*[saved.block()] * (encoders - 1), last, first, *[block] * (shape.layers - 1)]
    ending = max(saved.stream, saved.gathered) + 2 * FP32 * head * shared
    return Network(
        sizes=sizes,
        blocks=blocks,
        front=saved.embedded,
        loss=_loss_of_words(saved, targets, tied=True),
        ending=Moment(ending, sum(sizes), words * shape.width, "embedding", len(blocks)),
        waiting=FP32 * head,
    )


def convnet(config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, _: NetworkPart = WHOLE) -> Network | None:
    """The network of classification of images: its stages, then its fully connected layers. None where sizes are unknown."""
    if not facts["image"]:
        return None
    channels, labels = config.model.channels, len(facts["labels"])
    layers = convnet_layers(facts["image"], labels, channels, config.model.hidden)
    # A convolution looks at nine places of each of its planes.
    taken = [inputs * places // (9 if each < len(channels) else 1) for each, (inputs, _, places) in enumerate(layers)]
    images = slots * config.train.slot_samples
    blocks = []
    for each, ((inputs, outputs, places), left) in enumerate(zip(layers, [*taken[1:], labels], strict=True)):
        given = outputs * places if each < len(channels) else 0
        numbers = images * taken[each], images * given, images * left
        blocks.append(_layer_of_images(inputs, outputs, *numbers, arithmetic, first=not each))
    sizes = [size for inputs, outputs, _ in layers for size in (inputs * outputs, outputs)]
    return Network(sizes, blocks, 0.0, [Moment(0.0)], Moment(0.0, sum(sizes), 0, "embedding", len(blocks)))


def _layer_of_images(
    inputs: int, outputs: int, taken: int, given: int, left: int, arithmetic: Arithmetic, *, first: bool
) -> BlockMemory:
    """A layer that takes and leaves so many numbers; `given` is what a convolution gives to its ReLU, and 0 of a full layer.

    A layer saves its input; pooling what it reads, which ReLU saves too, and where it found what it leaves.
    """
    p = arithmetic.product
    saved, pooled = p * taken + arithmetic.stream * taken * (first and arithmetic.cast), given > left
    own, weights = (inputs + 1) * outputs, inputs * outputs
    through = PartMemory(saved, p * ((given and given - left) + (0 if first else taken)), own, weights)
    parts: tuple[PartMemory, ...] = (through,)
    if given:
        # ReLU's gradient comes to be beside pooling's, when what pooling was given and saved has gone.
        relu = max(p * given, p * (2 * given - left) - _PLACE * left * pooled)
        parts = (PartMemory((p * given + _PLACE * left) * pooled, relu, 0, 0), through)
    kept = saved + (0 if given else p * left)
    return BlockMemory(saved, kept, parts, p * left, weights)


def _tokens(config: Config, slots: int, sides: int = 1) -> int:
    """Most tokens of a micro-batch on each of so many sides; a sample that fills more than a bundle has one of its own."""
    longest = config.model.context * (2 if config.task == "preference" else 1)  # a pair has two sequences
    if config.train.slot_tokens:
        return slots * max(longest, config.train.slot_tokens // sides)
    return slots * config.train.slot_size * longest


def _embedding_sizes(shape: Model, words: int) -> list[int]:
    """Numbers of each parameter before the blocks."""
    return [words * shape.width] + [shape.context * shape.width] * (shape.flavour == "gpt2")


def _block_sizes(shape: Model) -> list[int]:
    return attention_sizes(shape) + feed_forward_sizes(shape)


def _final_sizes(shape: Model) -> list[int]:
    return [] if post_norm(shape) else norm_sizes(shape)


def _loss_of_words(saved: Saved, words: int, *, tied: bool) -> list[Moment]:
    """The last norm, the head and the loss: three times the logits in fp32; of our kernel a chunk of them, and the gradients
    of the hidden states and of the head, which it makes in the forward."""
    arithmetic, tokens, width = saved.arithmetic, saved.tokens, saved.shape.width
    p, head, below = arithmetic.product, words * width, saved.final
    logits, hidden, own = tokens * words, tokens * width * p, 0 if tied else head
    if saved.shape.logit_softcap:
        return _loss_of_capped_words(saved, words, tied=tied)
    if saved.gathered:
        return _loss_of_spread_words(saved, words, tied=tied)
    if not arithmetic.kernels:
        made = Moment(below + p * logits + hidden + FP32 * head * tied, own, own)
        return [Moment(below + 3 * FP32 * logits), made]
    rows, chunk = _chunk(saved, words)
    # The hidden states are not saved, but are there until the loss is done; their gradient is.
    forward = below + hidden + chunk + head * (p + FP32 * (rows < tokens) + p * arithmetic.cast)
    forward += saved.stream * arithmetic.cast
    backward = below + hidden + head * (p + p * arithmetic.cast + FP32 * tied)
    return [Moment(forward), Moment(backward, own, own)]


def _loss_of_capped_words(saved: Saved, words: int, *, tied: bool) -> list[Moment]:
    """As above where logits are bounded: of some rows at once, computed again in the backward, in four forms."""
    head, hidden = words * saved.shape.width, saved.tokens * saved.shape.width * saved.arithmetic.product
    chunk, several = 4 * FP32 * min(saved.tokens, _CAPPED) * words, saved.tokens > _CAPPED
    own = 0 if tied else head
    return [Moment(saved.final + 2 * hidden + chunk + FP32 * head * (tied + several), own, own)]


def _chunk(saved: Saved, words: int) -> tuple[int, int]:
    """Rows of a chunk of logits, and its bytes."""
    rows = min(saved.tokens, max(_SMALLEST_CHUNK, -(-saved.tokens // _CHUNKS)))
    return rows, saved.arithmetic.product * rows * -(-words // _ALIGNMENT) * _ALIGNMENT


def _loss_of_spread_words(saved: Saved, words: int, *, tied: bool) -> list[Moment]:
    """As above with some of the words: two chunks are on their way, and PyTorch, too, makes gradients in the forward."""
    arithmetic, head, (rows, chunk) = saved.arithmetic, words * saved.shape.width, _chunk(saved, words)
    p, several = arithmetic.product, rows < saved.tokens
    hidden = saved.tokens * saved.shape.width * p
    forward = saved.final + hidden + (1 + several) * chunk + p * head + FP32 * head * several + p * head * arithmetic.cast
    # What is saved is scaled into new memory.
    backward = saved.final + 2 * hidden + p * head + FP32 * head * tied
    return [Moment(forward), Moment(backward, 0 if tied else head, 0 if tied else head)]


NETWORKS: dict[str, Callable[[Config, Facts, int, Arithmetic, NetworkPart], Network | None]] = {
    "language_model": decoder,
    "completion": decoder,
    "preference": decoder,
    "classification": classifier,
    "translation": translator,
    "images": convnet,
}
"""What each of our tasks trains."""
