"""Make InjecAgent's examples (Zhan et al. 2024, MIT): `python -m data.injecagent.prepare`.

An agent has called the user's tool, and the answer holds an attacker's instruction: 510 cases of direct harm and 544 of
data stealing, plain ("base") and with a sentence that asks to ignore all else ("enhanced").
"""

import ast
import json
from pathlib import Path

from data.download import download
from data.files import run_prepare, write_examples

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


def make_example(name: str, kind: str, setting: str, case: dict, prompt: tuple[str, str], tools: dict, answers: dict) -> dict:
    """A case as it is asked. The benchmark fills in Python's spelling of a list of names, and JSON indented by one."""
    names = [case["User Tool"], *case["Attacker Tools"]]
    called = f"Action: {case['User Tool']}\nAction Input: {case['Tool Parameters']}\nObservation: {case['Tool Response']}"
    scratchpad = f"\n{case['Thought']}\n{called}\n"
    system, user = prompt
    user = user.format(
        available_tool_descriptions=json.dumps([tools[tool] for tool in names], indent=1),
        available_tool_names=names,
        input=case["User Instruction"],
        agent_scratchpad=scratchpad,
    )
    return {
        "id": name,
        "group": setting,
        "kind": kind,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "scratchpad": scratchpad,
        "user_tool": case["User Tool"],
        "attacker_tools": case["Attacker Tools"],
        "attacker_instruction": case["Attacker Instruction"],
        "answers": answers.get(case["Attacker Tools"][0], {}) if kind == "data stealing" else {},
    }


def prepare(folder: Path = HERE) -> list[dict]:
    """Writes folder/examples.jsonl and returns the examples. Raises what download raises, and ValueError for a damaged file."""
    paths = [f"data/test_cases_{kind}_{setting}.json" for kind in KINDS for setting in ("base", "enhanced")]
    paths += ["data/tools.json", "data/attacker_simulated_responses.json", "src/prompts/agent_prompts.py"]
    files = {path: download(f"{REPOSITORY}/{path}", folder / "raw" / Path(path).name) for path in paths}
    file, examples = next(iter(files.values())), []
    try:
        *cases, file = files.values()
        prompt = read_prompt(file)
        file = files["data/tools.json"]
        named = [(kit["toolkit"] + tool["name"], tool) for kit in json.loads(file.read_bytes()) for tool in kit["tools"]]
        tools = {name: {**tool, "name": name} for name, tool in named}
        file, answers = files["data/attacker_simulated_responses.json"], {}
        for call, answer in json.loads(file.read_bytes()).items():  # "(Tool,{"a": 1})"
            tool, _, parameters = call[1:-1].partition(",")
            answers.setdefault(tool, {})[parameters] = answer
        for path in paths[:4]:
            file, (kind, setting) = files[path], Path(path).stem.split("_")[2:]
            for number, case in enumerate(json.loads(file.read_bytes())):
                name = f"{kind}-{setting}-{number}"
                examples.append(make_example(name, KINDS[kind], setting, case, prompt, tools, answers))
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{file} is not of the published form ({error!r}): delete the file and run this again") from None
    return write_examples(folder, examples)


if __name__ == "__main__":
    run_prepare(prepare, HERE)
