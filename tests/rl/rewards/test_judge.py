"""A judge is another model: of the policy's server, or of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from tests.rl.rewards.test_rewards import said
from tinsmith.rl.rewards.format import Overlong
from tinsmith.rl.rewards.judge import Criterion, Judge, Responses
from tinsmith.rl.types import Message, Rollout, Task, Turn
from tinsmith.testing import ScriptedSnapshot

TASK = Task(
    id="t/0",
    messages=(Message(role="user", content="What is {this}?"),),
    answer="52",
    extra={"rubric": [{"title": "x", "description": "says 52", "weight": 3}, {"description": "is polite"}]},
)


def judged(judge: Judge, verdict: str, text: str = "it is {52}") -> float:
    """The reward of a judge model that always replies `verdict`."""
    return asyncio.run(judge.judge(TASK, said(text), ScriptedSnapshot((verdict,), np.zeros(1), 0))).value


@pytest.mark.parametrize(
    ("verdict", "worth"),
    [("Good.\nScore: 7", 0.7), ("score 3, no:\n**Score**: 9.5", 0.95), ("Score: 99", 1.0), ("Score: -4", 0.0)],
)
def test_judge_reads_the_last_grade_on_its_scale(verdict, worth):
    assert judged(Judge(model="big"), verdict) == pytest.approx(worth)
    with pytest.raises(ValueError, match="the judge gave no grade"):
        judged(Judge(model="big"), "quite good")


@pytest.mark.parametrize(("verdict", "worth"), [("[1, 0]", 0.75), ("so: [0, 1]", 0.25), ("[1,1]", 1.0), ("[0,0]", 0.0)])
def test_rubric_reward_is_the_weighted_share_of_met_criteria(verdict, worth):
    assert judged(Judge(model="big", rubric_key="rubric"), verdict) == pytest.approx(worth)


def test_rubric_of_the_run_may_have_negative_weights():
    rubric = (Criterion(description="is right"), Criterion(description="is rude", weight=-1))
    assert judged(Judge(model="big", rubric=rubric), "[1, 1]") == 0.0
    with pytest.raises(ValueError, match="no list of 2 marks"):
        judged(Judge(model="big", rubric=rubric), "[1]")
    with pytest.raises(ValueError, match="no rubric under 'criteria'"):
        judged(Judge(model="big", rubric_key="criteria"), "[1]")


@pytest.fixture
def judge_server() -> Iterator[tuple[str, list[dict]]]:
    """(base_url, received requests) of a judge server that always grades 5."""
    requests: list[dict] = []

    class GradeHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
            answer = json.dumps({"choices": [{"message": {"content": "Score: 5"}}]}).encode()
            self.send_response(200 if body["model"] == "big" else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), GradeHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_judge_with_base_url_is_called_over_http(judge_server, monkeypatch):
    url, requests = judge_server
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert judged(Judge(model="big", base_url=url, key_env="JUDGE_KEY"), "any reply") == 0.5
    assert requests[0]["path"] == "/v1/chat/completions"
    assert requests[0]["key"] == "Bearer secret"
    prompt = requests[0]["messages"][0]["content"]
    assert "What is {this}?" in prompt
    assert "it is {52}" in prompt
    assert "chat_template_kwargs" not in requests[0]
    values = {"enable_thinking": False}
    judged(Judge(model="big", base_url=url, chat_template_values=values), "any reply")
    assert requests[1]["chat_template_kwargs"] == values
    with pytest.raises(ValueError, match="answered 404"):
        judged(Judge(model="other", base_url=url), "")


def test_judge_rejects_settings_without_effect():
    with pytest.raises(ValueError, match="have no effect without base_url"):
        Judge(model="big", key_env="KEY")
    with pytest.raises(ValueError, match="high must be above low"):
        Judge(model="big", low=1, high=1)


@pytest.mark.parametrize(("length", "worth"), [(1, 0.0), (6, 0.0), (8, -0.5), (10, -1.0), (12, -1.0)])
def test_overlong_penalty_grows_with_reply_tokens(length, worth):
    turn = Turn(prompt=(1,), tokens=(2,) * length, logprobs=(0.0,) * length, text="", stop="stop")
    reward = Overlong(max_tokens=10, margin=4)
    policy = ScriptedSnapshot(("",), np.zeros(1), 0)
    assert asyncio.run(reward.judge(TASK, Rollout.single((turn,)), policy)) == pytest.approx(worth)


@pytest.mark.parametrize(("temperature", "sent"), [(0.0, 2), (0.7, 5)])
def test_equal_questions_at_temperature_0_are_sent_once(judge_server, temperature, sent):
    url, requests = judge_server
    judge = Judge(model="big", base_url=url, temperature=temperature)

    async def scores() -> list[float]:
        texts = ("a", "b", "a", "a")
        policy = ScriptedSnapshot(("",), np.zeros(1), 0)
        return [each.value for each in await asyncio.gather(*(judge.judge(TASK, said(text), policy) for text in texts))]

    assert asyncio.run(scores()) == [0.5] * 4
    assert judge == Judge(model="big", base_url=url, temperature=temperature)
    asyncio.run(judge.judge(TASK, said("a"), ScriptedSnapshot(("",), np.zeros(1), 0)))
    assert len(requests) == sent


def test_question_that_failed_is_sent_again():
    responses = Responses()
    answers = iter((ValueError("busy"), "52"))

    async def send() -> str:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    async def responses_to_three() -> list[object]:
        return await asyncio.gather(*(responses.get("39 + 13?", send) for _ in range(3)), return_exceptions=True)

    failed, *others = asyncio.run(responses_to_three())
    assert isinstance(failed, ValueError)
    assert others == ["52", "52"]
