"""Describes each task's network for the memory estimate, with the longest samples that a micro-batch may have.

Facts of the data are unknown before preparation; `expected_facts` gives those that follow from the settings. The number of
labels hardly matters. Sentences of a translator are as long as the context on both sides, or share a bundle evenly.

    network = describe_network(config, expected_facts(config), slots=2, arithmetic=Arithmetic())    # None: unknown
    network.count                                             # parameters
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raystride.model.objectives import DISTILLED_ROWS
from raystride.model.shape import (
    ENCODERS,
    convnet_layers,
    dense_sizes,
    has_first_norm,
    has_learned_positions,
    is_post_norm,
    is_tied,
    pooled_width,
    window_sizes,
)
from raystride.pipelines.config import Config, ObjectiveConfig, TrainConfig
from raystride.pipelines.config.model import ModelConfig
from raystride.pipelines.data.plugins import TASKS
from raystride.pipelines.train.memory.activations import FP32, Arithmetic, BlockMemory, Moment, Network, PartMemory
from raystride.pipelines.train.memory.cut import NetworkPart
from raystride.pipelines.train.memory.saved import (
    TransformerActivations,
    attention_sizes,
    cross_attention_sizes,
    feed_forward_sizes,
    norm_sizes,
)

WHOLE_NETWORK = NetworkPart()
Facts = Mapping[str, Any]
"""Facts of a task about prepared data; see `raystride.pipelines.data.tasks.task`."""
ASSUMED_NUM_LABELS = 10
"""Number of labels that is assumed before preparation."""
_CHUNKS, _MIN_CHUNK, _ALIGNMENT = 8, 1024, 64
"""As in `raystride.triton_kernels.linear_cross_entropy`, which cannot be imported without PyTorch."""
_CAPPED_CHUNK_ROWS = 1024
"""As in `raystride.model.loss`."""
_INDEX_BYTES = 8
"""Bytes of the index of a maximum that max-pooling saves."""


def expected_facts(config: Config) -> Facts:
    """Returns the facts that follow from the settings, and of a model of the user's own what one step of it measured.

    Raises SettingError, DataError if the latter fails.
    """
    vocab_size = config.tokenizer.vocabulary_size
    registered = TASKS.get(config.task)
    if registered is not None and registered.reads_dataset:
        return {"dataset": registered(config).describe_dataset()}
    image = {"image": config.data.image_size} if config.task == "images" else {}
    return {
        "vocabulary_size": vocab_size,
        "target_vocabulary_size": vocab_size,
        "labels": range(ASSUMED_NUM_LABELS),
        **image,
    }


def describe_network(
    config: Config, facts: Facts, *, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE_NETWORK
) -> Network | None:
    """Returns the network for `slots` slots; None if the task is not ours, or the size of images unknown.

    With a `part`, settings and facts are those that `cut` gives.
    """
    if "dataset" in facts:
        return measured_network(config.train, facts["dataset"], slots)
    build = NETWORKS.get(config.task)
    return build(config, facts, slots, arithmetic, part) if build else None


def measured_network(train: TrainConfig, description: Facts, slots: int) -> Network:
    """Describes a model of the user's own from `own_model.describe`: the worst moment of its step has all gradients."""
    sizes = [math.prod(shape) for shape in description["parameters"].values()]
    samples = slots * train.slot_size
    held = max(fixed + samples * by_sample for fixed, by_sample in description["step_bytes"])
    final_moment = Moment(held, sum(sizes), phase="embedding")
    moments = description.get("optimizer_moments")
    return Network(
        sizes=sizes, blocks=[], embedding_saved=held, loss=[], final_moment=final_moment, optimizer_moments=moments
    )


def decoder_network(
    config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE_NETWORK
) -> Network:
    """Describes the network of language modelling, completion and preference, with `slots` slots in a micro-batch."""
    shape, vocab_size = config.model, int(facts["vocabulary_size"])
    tokens = -(-_max_tokens(config, slots) // (part.context * part.expert))
    saved = TransformerActivations(shape, arithmetic, tokens, tensor_workers=part.tensor)
    head = vocab_size * shape.hidden_size
    # Tied: one backward passes through both uses of the embedding.
    tied, own_head = is_tied(shape) and not part.stages, part.last and not (is_tied(shape) and part.first)
    sizes = _embedding_sizes(shape, vocab_size) if part.first else []
    sizes += shape.layers * _block_sizes(shape)
    sizes += _final_sizes(shape) if part.last else []
    sizes += [head] if own_head else []
    final_moment = max(saved.stream, saved.gathered_stream) + 2 * FP32 * head * tied
    loss: list[Moment] = []
    if config.objective.teacher:
        loss = _distilled_loss_moments(config.model, config.objective, saved, vocab_size, tied=tied)
    elif part.last:
        loss = _token_loss_moments(saved, vocab_size, tied=tied)
    return Network(
        sizes=sizes,
        blocks=[saved.block()] * shape.layers,
        embedding_saved=saved.embedding_saved if part.first else 0.0,
        loss=loss,
        final_moment=Moment(final_moment, sum(sizes), head * part.first, "embedding", shape.layers),
        head=head * own_head,
        deferred_gradient=FP32 * head * tied,
    )


def classifier_network(
    config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE_NETWORK
) -> Network:
    """Describes the network of text classification, with `slots` slots in a micro-batch."""
    shape, vocab_size, labels = config.model, int(facts["vocabulary_size"]), len(facts["labels"])
    saved = TransformerActivations(shape, arithmetic, _max_tokens(config, slots), padded=True, tensor_workers=part.tensor)
    head, windows = [labels * pooled_width(shape), labels], _window_blocks(saved, shape)
    blocks = [saved.block()] * shape.layers + windows
    # A parameter of the model itself comes before those of its modules.
    sizes = [shape.hidden_size] * (shape.pooling == "attention") + _embedding_sizes(shape, vocab_size)
    sizes += norm_sizes(shape) * (shape.architecture in ENCODERS)
    in_blocks = shape.layers * _block_sizes(shape)
    in_blocks = in_blocks if has_first_norm(shape, 0) else in_blocks[len(norm_sizes(shape)) :]
    sizes += in_blocks + _final_sizes(shape) + window_sizes(shape) + dense_sizes(shape) + head
    return Network(
        sizes=sizes,
        blocks=blocks,
        embedding_saved=saved.embedding_saved,
        loss=[Moment(0.0 if windows else saved.final_norm + 2 * saved.stream, sum(head))],
        final_moment=Moment(
            max(saved.stream, saved.gathered_stream), sum(sizes), vocab_size * shape.hidden_size, "embedding", len(blocks)
        ),
        head=sum(head),
    )


def _window_blocks(saved: TransformerActivations, shape: ModelConfig) -> list[BlockMemory]:
    """Returns the blocks of pooling by windows.

    In their backward the last comes first; the tensors that the final norm saved are held until then.
    """
    if shape.pooling != "windows":
        return []
    numbers, last = saved.tokens * saved.arithmetic.matmul, len(shape.windows) - 1
    blocks = []
    for index, size in enumerate(shape.windows):
        num_inputs, num_outputs = size * shape.hidden_size, shape.window_channels
        part = PartMemory(
            numbers * (num_inputs + num_outputs),
            numbers * num_inputs,
            (num_inputs + 1) * num_outputs,
            num_inputs * num_outputs,
        )
        norm = 0.0 if index or is_post_norm(shape) else saved.final_norm
        gradient = saved.stream if index < last else 0.0
        blocks.append(
            BlockMemory(
                0.0 if index else saved.stream,
                numbers * num_outputs,
                (part,),
                gradient,
                num_inputs * num_outputs,
                extra_kept=norm,
            )
        )
    return blocks


def translator_network(
    config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, part: NetworkPart = WHOLE_NETWORK
) -> Network:
    """Describes the network of translation: the encoder's blocks, then the decoder's."""
    shape, vocab_size = config.model, int(facts["vocabulary_size"])
    encoders, shared = shape.encoder_layers or shape.layers, config.tokenizer.shared
    targets = vocab_size if shared else int(facts["target_vocabulary_size"])
    tokens = _max_tokens(config, slots, sides=2)
    saved, target = (
        TransformerActivations(shape, arithmetic, tokens, padded=side == 0, tensor_workers=part.tensor) for side in range(2)
    )
    last = replace(saved.block(), extra_kept=saved.final_norm + saved.embedding_saved)
    block = target.target_block(tokens)
    head, positions = targets * shape.hidden_size, _embedding_sizes(shape, vocab_size)[1:]
    sizes = [vocab_size * shape.hidden_size] + ([] if shared else [head]) + 2 * positions
    sizes += encoders * _block_sizes(shape) + _final_sizes(shape)
    sizes += shape.layers * (
        attention_sizes(shape) + cross_attention_sizes(shape) + feed_forward_sizes(shape)
    ) + _final_sizes(shape)
    # The target embedding's gradient is added to the head's, into new memory.
    embedding_saved = PartMemory(0.0, FP32 * head * (1 + shared), 0, 0 if shared else head)
    first = replace(block, parts=(*block.parts, embedding_saved))
    blocks = [*[saved.block()] * (encoders - 1), last, first, *[block] * (shape.layers - 1)]
    final_moment = max(saved.stream, saved.gathered_stream) + 2 * FP32 * head * shared
    return Network(
        sizes=sizes,
        blocks=blocks,
        embedding_saved=saved.embedding_saved,
        loss=_token_loss_moments(saved, targets, tied=True),
        final_moment=Moment(final_moment, sum(sizes), vocab_size * shape.hidden_size, "embedding", len(blocks)),
        deferred_gradient=FP32 * head,
    )


def convnet_network(
    config: Config, facts: Facts, slots: int, arithmetic: Arithmetic, _: NetworkPart = WHOLE_NETWORK
) -> Network | None:
    """Describes the network of image classification: stages, then fully connected layers. None if sizes are unknown."""
    if not facts["image"]:
        return None
    channels, labels = config.model.channels, len(facts["labels"])
    layers = convnet_layers(facts["image"], labels, channels, config.model.hidden)
    # A convolution reads nine positions of each of its planes.
    num_inputs = [inputs * places // (9 if index < len(channels) else 1) for index, (inputs, _, places) in enumerate(layers)]
    images = slots * config.train.slot_samples
    blocks = []
    for index, ((inputs, outputs, places), num_outputs) in enumerate(zip(layers, [*num_inputs[1:], labels], strict=True)):
        num_conv_outputs = outputs * places if index < len(channels) else 0
        numbers = images * num_inputs[index], images * num_conv_outputs, images * num_outputs
        blocks.append(_image_layer_memory(inputs, outputs, *numbers, arithmetic, is_first=not index))
    sizes = [size for inputs, outputs, _ in layers for size in (inputs * outputs, outputs)]
    return Network(sizes, blocks, 0.0, [Moment(0.0)], Moment(0.0, sum(sizes), 0, "embedding", len(blocks)))


def _image_layer_memory(
    inputs: int,
    outputs: int,
    num_inputs: int,
    num_conv_outputs: int,
    num_outputs: int,
    arithmetic: Arithmetic,
    *,
    is_first: bool,
) -> BlockMemory:
    """Returns the memory of a convolution, or of a fully connected layer with 0 `num_conv_outputs` (the input of ReLU).

    A layer saves its input. Pooling saves its input, which ReLU saves too, and the index of each maximum.
    """
    p = arithmetic.matmul
    saved, is_pooled = (
        p * num_inputs + arithmetic.stream * num_inputs * (is_first and arithmetic.autocasts),
        num_conv_outputs > num_outputs,
    )
    num_parameters, weights = (inputs + 1) * outputs, inputs * outputs
    linear = PartMemory(
        saved,
        p * ((num_conv_outputs and num_conv_outputs - num_outputs) + (0 if is_first else num_inputs)),
        num_parameters,
        weights,
    )
    parts: tuple[PartMemory, ...] = (linear,)
    if num_conv_outputs:
        # ReLU's gradient is made besides pooling's, when pooling's input and saved indices have been freed.
        relu = max(p * num_conv_outputs, p * (2 * num_conv_outputs - num_outputs) - _INDEX_BYTES * num_outputs * is_pooled)
        parts = (PartMemory((p * num_conv_outputs + _INDEX_BYTES * num_outputs) * is_pooled, relu, 0, 0), linear)
    bytes_kept = saved + (0 if num_conv_outputs else p * num_outputs)
    return BlockMemory(saved, bytes_kept, parts, p * num_outputs, weights)


def _max_tokens(config: Config, slots: int, sides: int = 1) -> int:
    """Returns the most tokens of a micro-batch on each side; a sample longer than a bundle has one of its own."""
    longest = config.model.context * (2 if config.task == "preference" else 1)  # a pair has two sequences
    if config.train.slot_tokens:
        return slots * max(longest, config.train.slot_tokens // sides)
    return slots * config.train.slot_size * longest


def _embedding_sizes(shape: ModelConfig, vocab_size: int) -> list[int]:
    """Returns the numbers of each parameter before the blocks."""
    return [vocab_size * shape.hidden_size] + [shape.context * shape.hidden_size] * has_learned_positions(shape)


def _block_sizes(shape: ModelConfig) -> list[int]:
    return attention_sizes(shape) + feed_forward_sizes(shape)


def _final_sizes(shape: ModelConfig) -> list[int]:
    return [] if is_post_norm(shape) else norm_sizes(shape)


def _token_loss_moments(saved: TransformerActivations, vocab_size: int, *, tied: bool) -> list[Moment]:
    """Returns the moments of the last norm, the head and the loss.

    The loss takes three times the logits in fp32. Our kernel holds a chunk of them, and the gradients of the hidden states
    and of the head, which it makes in the forward.
    """
    arithmetic, tokens, width = saved.arithmetic, saved.tokens, saved.shape.hidden_size
    p, head, below = arithmetic.matmul, vocab_size * width, saved.final_norm
    logits, hidden, own = tokens * vocab_size, tokens * width * p, 0 if tied else head
    if saved.shape.logit_softcap:
        return _capped_loss_moments(saved, vocab_size, tied=tied)
    if saved.gathered_stream:
        return _sharded_loss_moments(saved, vocab_size, tied=tied)
    if not arithmetic.kernels:
        made = Moment(below + p * logits + hidden + FP32 * head * tied, own, own)
        return [Moment(below + 3 * FP32 * logits), made]
    rows, chunk = _logits_chunk(saved, vocab_size)
    # The hidden states are not saved, but live until the loss is done; their gradient is saved.
    forward = below + hidden + chunk + head * (p + FP32 * (rows < tokens) + p * arithmetic.autocasts)
    forward += saved.stream * arithmetic.autocasts
    backward = below + hidden + head * (p + p * arithmetic.autocasts + FP32 * tied)
    return [Moment(forward), Moment(backward, own, own)]


def _capped_loss_moments(saved: TransformerActivations, vocab_size: int, *, tied: bool) -> list[Moment]:
    """Returns the moments of a loss with capped logits: some rows at once, recomputed in the backward, in four forms."""
    head, hidden = vocab_size * saved.shape.hidden_size, saved.tokens * saved.shape.hidden_size * saved.arithmetic.matmul
    chunk, several = 4 * FP32 * min(saved.tokens, _CAPPED_CHUNK_ROWS) * vocab_size, saved.tokens > _CAPPED_CHUNK_ROWS
    own = 0 if tied else head
    return [Moment(saved.final_norm + 2 * hidden + chunk + FP32 * head * (tied + several), own, own)]


def _distilled_loss_moments(
    model: ModelConfig, objective: ObjectiveConfig, saved: TransformerActivations, vocab_size: int, *, tied: bool
) -> list[Moment]:
    """Returns the moments of a teacher's forward, of a chunk of both models' logits, and of the loss's backward.

    A chunk is four matrices, one more with a temperature; the head's gradient is summed in fp32.
    """
    from raystride.pipelines.data.teacher import teacher_shape

    teacher = TransformerActivations(teacher_shape(model, objective), saved.arithmetic, saved.tokens)
    hidden = 2 * saved.tokens * saved.shape.hidden_size * FP32  # and its gradient
    head, own = FP32 * vocab_size * saved.shape.hidden_size, 0 if tied else vocab_size * saved.shape.hidden_size
    chunk = (4 + (objective.temperature != 1)) * FP32 * min(saved.tokens, DISTILLED_ROWS) * vocab_size
    taught = saved.final_norm + teacher.block().saved_bytes + 2 * teacher.stream
    forward = saved.final_norm + hidden + teacher.stream + max(head + chunk, 2 * head + chunk / 2)
    return [Moment(taught), Moment(forward), Moment(saved.final_norm + hidden + head * (1 + tied), own, own)]


def _logits_chunk(saved: TransformerActivations, vocab_size: int) -> tuple[int, int]:
    """Returns the rows of a chunk of logits, and its bytes."""
    rows = min(saved.tokens, max(_MIN_CHUNK, -(-saved.tokens // _CHUNKS)))
    return rows, saved.arithmetic.matmul * rows * -(-vocab_size // _ALIGNMENT) * _ALIGNMENT


def _sharded_loss_moments(saved: TransformerActivations, vocab_size: int, *, tied: bool) -> list[Moment]:
    """Returns the moments with a sharded vocabulary.

    Two chunks are in flight, and PyTorch, too, makes gradients in the forward.
    """
    arithmetic, head, (rows, chunk) = (
        saved.arithmetic,
        vocab_size * saved.shape.hidden_size,
        _logits_chunk(saved, vocab_size),
    )
    p, several = arithmetic.matmul, rows < saved.tokens
    hidden = saved.tokens * saved.shape.hidden_size * p
    forward = (
        saved.final_norm
        + hidden
        + (1 + several) * chunk
        + p * head
        + FP32 * head * several
        + p * head * arithmetic.autocasts
    )
    # Saved gradients are scaled into new memory.
    backward = saved.final_norm + 2 * hidden + p * head + FP32 * head * tied
    return [Moment(forward), Moment(backward, 0 if tied else head, 0 if tied else head)]


NETWORKS: dict[str, Callable[[Config, Facts, int, Arithmetic, NetworkPart], Network | None]] = {
    "language_model": decoder_network,
    "completion": decoder_network,
    "preference": decoder_network,
    "classification": classifier_network,
    "translation": translator_network,
    "images": convnet_network,
}
"""Builders of each task's description."""
