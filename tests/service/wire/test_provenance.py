"""Provenance spans, through the SDK's own encoder."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest
import tinker
from tinker import types
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from tinsmith.errors import BadRequest
from tinsmith.service.wire.protobuf import pb
from tinsmith.service.wire.provenance import MAX_REQUESTS, SequenceRegistry, parse_claims


def spanned(sequence: str, prompt: int, sampled: int) -> types.Datum:
    """A datum of a prompt and a sampled reply, with targets shifted by one."""
    whole = [5] * (prompt + sampled)
    inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
    return datum.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=sequence, length=prompt),
            SampledProvenanceSpan(sequence_id=sequence, length=sampled - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=sequence, offset=1, length=prompt - 1),
            SampledProvenanceSpan(sequence_id=sequence, length=sampled),
        ],
    )


def test_accepts_spans_of_samples_and_rejects_others(
    client: tinker.ServiceClient, train: tinker.TrainingClient
) -> None:
    sampler = client.create_sampling_client(base_model="toy").result()
    prompt, params = types.ModelInput.from_ints([5, 5, 5]), types.SamplingParams(max_tokens=4, stop=[])
    first, two = sampler.sample(prompt, 2, params).result().sequences
    for sequence in (first, two):
        answer = train.forward_backward([spanned(sequence.sequence_id, 3, 4)], "cross_entropy").result()
        assert len(answer.loss_fn_outputs) == 1
    request = first.sequence_id.rpartition(":")[0]
    for wrong, says in (
        (spanned(first.sequence_id, 4, 4), "prompt tokens"),
        (spanned(first.sequence_id, 3, 5), "sampled tokens"),
        (spanned(f"{request}:2", 3, 4), "does not exist"),
        (spanned("somebody:sample:0:1:0", 3, 4), "does not exist"),
        (spanned("nonsense", 3, 4), "does not exist"),
    ):
        with pytest.raises(tinker.BadRequestError, match=says):
            train.forward_backward([wrong], "cross_entropy").result()


def message(inputs: list[tuple[int, int]], targets: list[tuple[int, int]]) -> pb.ForwardBackwardRequest:
    made = pb.ForwardBackwardRequest()
    datum = made.data.add()
    for spans, values in ((datum.model_input_spans, inputs), (datum.loss_fn_input_spans, targets)):
        for offset, length in values:
            first = spans.add().sampled_tokens
            first.sequence_id, first.offset, first.length = "s:sample:0:1:0", offset, length
    return made


@pytest.mark.parametrize(
    ("inputs", "targets", "says"),
    [
        ([(0, 3)], [], "both or neither"),
        ([(0, 2)], [(0, 3)], "2 positions of 3"),
        ([(0, 3)], [(0, 4)], "4 positions of 3"),
        ([(-1, 3)], [(0, 3)], "offset -1"),
        ([(0, 4), (0, -1)], [(0, 3)], "length -1"),
    ],
)
def test_rejects_spans_that_do_not_tile(inputs: list, targets: list, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_claims(message(inputs, targets), [(3, 3)])


def test_rejects_an_empty_span() -> None:
    made = message([(0, 3)], [(0, 3)])
    made.data[0].model_input_spans.add()
    with pytest.raises(BadRequest, match=r"model_input_spans\[1\] is empty"):
        parse_claims(made, [(3, 3)])
    assert parse_claims(pb.ForwardBackwardRequest(data=[pb.Datum()]), [(3, 3)]) == []


def test_accepts_claims_about_dropped_samples() -> None:
    sequences = SequenceRegistry({"s:sample:0": "ada"}.get)
    claims = parse_claims(message([(0, 3)], [(0, 3)]), [(3, 3)])
    sequences.check(claims, "ada")
    sequences.record("s:sample:0:1", 9, [2])
    with pytest.raises(BadRequest):
        sequences.check(claims, "ada")
    for number in range(MAX_REQUESTS):
        sequences.record(str(number), 1, [1])
    sequences.check(claims, "ada")


def test_keeps_the_lengths_of_a_request_in_few_bytes() -> None:
    """50,000 tuples and lists of a busy service were 45 MiB, and as many objects for each garbage collection."""
    sequences, requests = SequenceRegistry(lambda sampler: "ada"), 20_000
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    for number in range(requests):
        sequences.record(f"9f0c7d1e-5c1b-4b52-8c39-2f1d7f6c0a11:sample:7:{number}", 4000, range(300, 308))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 250 * requests, taken / requests
    assert len(gc.get_objects()) < objects + requests / 10
    claims = parse_claims(message([(0, 301)], [(0, 301)]), [(301, 301)])
    claims = [replace(claim, sequence_id="9f0c7d1e-5c1b-4b52-8c39-2f1d7f6c0a11:sample:7:5:1") for claim in claims]
    sequences.check(claims, "ada")
    with pytest.raises(BadRequest, match="301"):
        sequences.check([replace(claims[0], length=302)], "ada")


def test_a_request_that_is_recorded_twice_counts_once() -> None:
    sequences = SequenceRegistry(lambda sampler: "ada")
    for number in range(2 * MAX_REQUESTS):
        sequences.record("s:sample:0:1" if number % 2 else str(number), 9, [2])
    claims = parse_claims(message([(0, 3)], [(0, 3)]), [(3, 3)])
    with pytest.raises(BadRequest):
        sequences.check(claims, "ada")
