"""Make InjecAgent's examples (Zhan et al. 2024, MIT): `python -m data.injecagent.prepare`.

An agent has called the user's tool, and the answer holds an attacker's instruction: 510 cases of direct harm and 544 of
data stealing, plain ("base") and with a sentence that asks to ignore all else ("enhanced").
"""

import ast
import json
from pathlib import Path

from data.download import download
from data.files import read_json, read_records, run_prepare, write_examples

HERE = Path(__file__).parent
REPOSITORY = "https://raw.githubusercontent.com/uiuc-kang-lab/InjecAgent/main"
KINDS = {"dh": "direct harm", "ds": "data stealing"}


def read_prompt(file: Path) -> tuple[str, str]:
    """The system's and the user's part of the prompt, which the benchmark keeps in a Python file: read, never run."""
    texts = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            texts[node.targets[0].id] = node.value.value
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = dict(zip((key.value for key in node.value.keys), node.value.values))["InjecAgent"].elts
    return texts[names[0].id], texts[names[1].id]


def make_example(case: dict, prompt: tuple[str, str], tools: dict[str, dict]) -> dict:
    """A case as it is asked. The benchmark fills in Python's spelling of a list of names, and JSON indented by one."""
    names, (system, user) = [case["User Tool"], *case["Attacker Tools"]], prompt
    called = f"Action: {case['User Tool']}\nAction Input: {case['Tool Parameters']}"
    scratchpad = f"\n{case['Thought']}\n{called}\nObservation: {case['Tool Response']}\n"
    user = user.format(
        available_tool_descriptions=json.dumps([tools[tool] for tool in names], indent=1),
        available_tool_names=names,
        input=case["User Instruction"],
        agent_scratchpad=scratchpad,
    )
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "scratchpad": scratchpad,
        "user_tool": case["User Tool"],
        "attacker_tools": case["Attacker Tools"],
        "attacker_instruction": case["Attacker Instruction"],
    }


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl, and returns the examples. Raises what download raises, and ValueError for a damaged
    file."""

    def get(path: str) -> Path:
        return download(f"{REPOSITORY}/{path}", folder / "raw" / Path(path).name)

    tools, answers, examples = {}, {}, []
    try:
        prompt = read_prompt(get("src/prompts/agent_prompts.py"))
        for _, kit in read_records(get("data/tools.json")):
            for tool in kit["tools"]:
                tools[kit["toolkit"] + tool["name"]] = {**tool, "name": kit["toolkit"] + tool["name"]}
    except (LookupError, TypeError, AttributeError, SyntaxError, UnboundLocalError) as error:
        raise ValueError(f"prompt or tools in {folder / 'raw'} are not as published ({error!r}): delete them") from None
    for call, answer in read_json(get("data/attacker_simulated_responses.json")).items():  # "(Tool,{"a": 1})"
        tool, _, parameters = call[1:-1].partition(",")
        answers.setdefault(tool, {})[parameters] = answer
    for short, kind in KINDS.items():
        for setting in ("base", "enhanced"):
            for number, (place, case) in enumerate(read_records(get(f"data/test_cases_{short}_{setting}.json"))):
                try:
                    example = make_example(case, prompt, tools)
                except (LookupError, TypeError, AttributeError) as error:
                    raise ValueError(f"{place} is not of the published form ({error!r}): get the file anew") from None
                about = {"id": f"{short}-{setting}-{number}", "group": setting, "kind": kind}
                canned = answers.get(case["Attacker Tools"][0], {}) if kind == "data stealing" else {}
                examples.append({**about, **example, "answers": canned})
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
