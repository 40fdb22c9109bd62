// The calculator: plans of planner.js, or of the tables that scripts/plan_tables.py writes for models that it does not know.
"use strict";

const LABELS = {
  model: "Model", gpu: "GPU", cpu: "CPU of the R-workers", weights: "Weights", seq_len: "Context, tokens",
  tpot: "Longest time per token",
};
const EXAMPLES = {
  "A desktop, long chats": { model: "llama-3-8b", gpu: "rtx-5090", cpu: "ryzen-9950x", weights: "gguf-q4_k_m", seq_len: "32768", tpot: "100" },
  "A server, many users": { model: "llama-3.3-70b", gpu: "h100", cpu: "epyc-9654", weights: "plain", seq_len: "32768", tpot: "100" },
};
const FIRST = EXAMPLES["A desktop, long chats"];
const HINTS = {
  gpu: "a name, or 1792GB/s:210TFLOPS:32GiB", cpu: "a name, or 90GB/s:16cores:64GiB", seq_len: "prompt and output, tokens",
  tpot: "ms per token, or inf for any",
};
const PRICES = { gpu_price: "Price of a GPU hour", cpu_price: "Price of a host hour" };

// The entry's place in a model's table: the last choice changes fastest.
function place(axes, chosen) {
  return Object.entries(axes).reduce((index, [name, values]) => {
    const position = values.map(String).indexOf(String(chosen[name]));
    if (position < 0) throw new RangeError(`plans of this model are at hand for ${name} ${values.join(", ")}, not ${chosen[name]}; ` +
      "fastdecode plan takes any");
    return index * values.length + position;
  }, 0);
}

function commandLine(chosen, ranks) {
  const words = ["fastdecode plan", `--model ${chosen.model}`, `--gpu ${chosen.gpu}`, `--cpu ${chosen.cpu}`,
    `--seq-len ${chosen.seq_len}`, `--prompt-len ${Math.floor(chosen.seq_len * 7 / 8)}`, `--tpot ${chosen.tpot}`];
  if (chosen.weights !== "plain") words.push(`--weights ${chosen.weights}`);
  if (chosen.live) words.push(`--kv-shard-tokens ${uncut(chosen.seq_len)}`);
  if (ranks > 1) words.push(`--tensor-parallel-size ${ranks}`);
  for (const name of Object.keys(PRICES)) if (chosen[name]) words.push(`--${name.replace("_", "-")} ${chosen[name]}`);
  return words.join(" ");
}

// A range that no sequence is longer than: the equations here know no ranges.
const uncut = (seqLen) => 2 ** Math.max(Math.ceil(Math.log2(seqLen)), 9);

const milliseconds = (value) => `${value >= 100 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3))} ms`;
const users = (number) => `${number.toLocaleString("en")} user${number === 1 ? "" : "s"}`;

// What the planner's verdict says, from the same figures (perfmodel/lab/verdict.py).
function verdict(entry, chosen) {
  const each = `at ${milliseconds(entry.tpot_ms)} per token for ${entry.users > 1 ? "each of " : ""}${users(entry.users)}`;
  const whole = `${Number(entry.tokens_per_second.toPrecision(4)).toLocaleString("en")} tokens/s in all, ${each}`;
  const alone = entry.alone ? `the GPU alone serves ${users(entry.alone_batch)} at ${milliseconds(entry.alone_tpot_ms)} per token`
    : `the GPU alone cannot run one such sequence within its memory and ${chosen.tpot} ms per token`;
  if (!entry.keeps_limits)
    return `Do not use FastDecode here: it cannot keep to ${chosen.tpot} ms per token. Its fastest plan: ${whole}; ${alone}.`;
  if (!entry.alone) return `FastDecode: ${whole}; ${alone}.`;
  const ratio = entry.tokens_per_second / entry.alone;
  const times = `${Number(ratio.toPrecision(2))} x the tokens per second of the GPU alone, ${each}; ${alone}`;
  if (ratio <= 1) return `Do not use FastDecode here: it gives ${times}.`;
  if (ratio < 1.2)
    return `Do not use FastDecode here on these figures alone, the gain is within their error: it gives ${times}.`;
  return `FastDecode gives ${times}.`;
}

// Of a million output tokens; null where a price that is needed is missing.
function price(chosen, ranks, hosts, tokensPerSecond) {
  const unknown = chosen.cpu_price === undefined || chosen.cpu_price === null || chosen.cpu_price === "";
  if (!chosen.gpu_price || (hosts && unknown) || !tokensPerSecond) return null;
  return (ranks * chosen.gpu_price + hosts * (chosen.cpu_price || 0)) / 3600 / tokensPerSecond * 1e6;
}

const shown = (value) => value === null ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: 3 });

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "text"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function label(name, value) {
  if (name === "weights") return value === "plain" ? "16 bits" : value;
  if (name === "tpot") return value === "inf" ? "any" : `${value} ms`;
  return name === "seq_len" ? Number(value).toLocaleString("en") : String(value);
}

function form(choices, data, onChange) {
  const made = element("form", { "aria-label": "What is to be planned" });
  const presets = { ...choices.axes, gpu: Object.keys(data.gpus), cpu: Object.keys(data.hosts) };
  for (const [name, values] of Object.entries({ model: choices.models, ...presets })) {
    if (!HINTS[name]) {
      const select = element("select", { name }, ...values.map((value) => element("option", { value }, label(name, value))));
      if (FIRST[name]) select.value = FIRST[name];
      made.append(element("label", {}, LABELS[name], select));
      continue;
    }
    const list = element("datalist", { id: `known-${name}` }, ...values.map((value) => element("option", { value })));
    const input = element("input", { name, list: list.id, value: FIRST[name], "aria-describedby": `hint-${name}`, autocomplete: "off" });
    made.append(element("label", {}, LABELS[name], input, element("small", { id: `hint-${name}` }, HINTS[name])), list);
  }
  for (const [name, text] of Object.entries(PRICES))
    made.append(element("label", {}, text, element("input", { name, type: "number", min: 0, step: "any" })));
  for (const [text, example] of Object.entries(EXAMPLES)) {
    const button = element("button", { type: "button", class: "md-button" }, text);
    button.addEventListener("click", () => {
      for (const [name, value] of Object.entries(example)) made.elements[name].value = value;
      onChange();
    });
    made.append(button);
  }
  made.addEventListener("input", onChange);
  made.addEventListener("submit", (event) => event.preventDefault());
  return made;
}

// Tokens per second over the number of R-workers, with the GPUs alone as a dashed line; hollow where memory lacks.
function chart(entry) {
  const [width, height, left, low] = [560, 240, 60, 200];
  const most = Math.max(...entry.candidates.map((row) => row[3]), entry.alone || 0) * 1.08;
  const last = Math.max(...entry.candidates.map((row) => row[0]));
  const x = (count) => left + (width - left - 20) * count / last;
  const y = (rate) => low - (low - 12) * rate / most;
  const picture = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "Output tokens per second by number of R-workers; the table below has the figures" });
  const points = entry.candidates.map((row) => `${x(row[0])},${y(row[3])}`);
  picture.append(
    element("path", { class: "axis", d: `M${left},8V${low}H${width - 12}` }),
    element("path", { class: "curve", d: `M${points.join("L")}` }),
    element("text", { x: 4, y: 20 }, `${shown(most)}/s`),
    element("text", { x: left, y: height - 8 }, entry.ranks > 1 ? "R-workers of each rank" : "R-workers"),
  );
  for (const row of entry.candidates) {
    const kind = row[4] ? "point" : "point lacking";
    picture.append(element("circle", { class: kind, cx: x(row[0]), cy: y(row[3]), r: row[0] === entry.num_r_workers ? 6 : 3.5 }));
    picture.append(element("text", { x: x(row[0]) - 4, y: low + 16 }, String(row[0])));
  }
  if (entry.alone) {
    const at = y(entry.alone);
    picture.append(element("line", { class: "alone", x1: left, x2: width - 12, y1: at, y2: at }));
    picture.append(element("text", { x: width - 12, y: at - 5, "text-anchor": "end" }, "GPUs alone"));
  }
  return picture;
}

// Without heads of columns, the first cell of each row is its head.
function table(rows, head = null) {
  const cell = (text, scope) => scope ? element("th", { scope }, String(text)) : element("td", {}, String(text));
  const line = ([first, ...others]) => element("tr", {}, cell(first, head ? null : "row"), ...others.map((text) => cell(text)));
  const made = element("table", {}, element("tbody", {}, ...rows.map(line)));
  if (head) made.prepend(element("thead", {}, element("tr", {}, ...head.map((text) => cell(text, "col")))));
  return element("div", { class: "md-typeset__scrollwrap" }, element("div", { class: "md-typeset__table", tabindex: 0 }, made));
}

function figures(chosen, entry) {
  const [gpuPrice, cpuPrice] = entry.prices;
  const priced = chosen.gpu_price ? chosen : { gpu_price: gpuPrice, cpu_price: cpuPrice };
  const cost = price(priced, entry.ranks, entry.num_hosts, entry.tokens_per_second);
  const alone = price(priced, entry.ranks, 0, entry.alone);
  const ranks = entry.ranks > 1 ? ` for each of ${entry.ranks} ranks, ${entry.total_r_workers} in all` : "";
  const each = (milliseconds) => milliseconds === null ? null : 1000 / milliseconds;
  const ways = [
    ["Users served at once", shown(entry.users), shown(entry.alone_batch || null)],
    ["Tokens/s in all", shown(entry.tokens_per_second), shown(entry.alone || null)],
    ["Tokens/s for each user", shown(each(entry.tpot_ms)), shown(each(entry.alone_tpot_ms))],
    ["ms per token", shown(entry.tpot_ms), shown(entry.alone_tpot_ms)],
    ["s to the first token", shown(entry.ttft_seconds), shown(entry.alone_ttft_seconds)],
    [chosen.gpu_price ? "Price of a million tokens" : "USD for a million tokens, list prices", shown(cost), shown(alone)],
  ];
  const answer = [
    ["GPUs", entry.ranks],
    ["R-workers", `${entry.num_r_workers}${ranks}, on ${entry.num_hosts} host${entry.num_hosts > 1 ? "s" : ""}`],
    ["What takes longest", entry.bottleneck],
  ];
  if (entry.kv_shard_tokens) answer.push(["Ranges of a sequence", `${label("seq_len", entry.kv_shard_tokens)} tokens on each R-worker`]);
  const rows = entry.candidates.map(([count, hosts, step, rate, fits]) => {
    const paid = price(priced, entry.ranks, hosts, rate);
    return [count, hosts, shown(step), shown(rate), fits ? "yes" : "no", ...(cost === null ? [] : [shown(paid)])];
  });
  const head = ["R-workers", "hosts", "step, ms", "tokens/s", "memory holds it", ...(cost === null ? [] : ["price of a million"])];
  return [element("p", { class: "answer" }, entry.verdict), table(ways, ["", "FastDecode", "GPUs alone"]), table(answer),
    ...(entry.one_host ? [] : [chart(entry), table(rows, head)])];
}

function start(root, choices, data, folder) {
  const result = element("div", { "aria-live": "polite" });
  const asked = form(choices, data, show);
  root.replaceChildren(asked, result);
  function show() {
    const chosen = Object.fromEntries(new FormData(asked));
    chosen.gpu = chosen.gpu.trim().replace(/ /g, ""); chosen.cpu = chosen.cpu.trim().replace(/ /g, "");
    const tables = window.planTables ??= {};
    chosen.live = chosen.model in data.models;
    if (!chosen.live && !tables[chosen.model]) return load(`${folder}${chosen.model}.js`);
    let entry;
    try {
      entry = chosen.live ? planned(chosen) : tables[chosen.model][place(choices.axes, chosen)];
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      entry = { reason: error.message };
    }
    const found = entry.reason ? [element("p", { class: "answer" }, `No plan: ${entry.reason}.`)] : figures(chosen, entry);
    const command = element("pre", {}, element("code", { tabindex: 0 }, commandLine(chosen, entry.ranks)));
    result.replaceChildren(...found, command);
  }
  function planned(chosen) {
    if (!(Number(chosen.seq_len) >= 8)) throw new RangeError("the context is a number of tokens of at least 8");
    if (chosen.tpot !== "inf" && !(Number(chosen.tpot) > 0)) throw new RangeError("the longest time per token is above 0 ms, or inf");
    const most = data.max_context[chosen.model];
    if (most && chosen.seq_len > most) throw new RangeError(`${chosen.model} has contexts of up to ${most.toLocaleString("en")} tokens`);
    const entry = window.livePlan(data, chosen);
    return { ...entry, verdict: verdict(entry, chosen) };
  }
  function load(source) {
    const script = element("script", { src: source });
    script.addEventListener("load", show);
    script.addEventListener("error", () => result.replaceChildren(`${source} could not be loaded.`));
    document.head.append(script);
  }
  show();
}

if (typeof document === "undefined") module.exports = { place, commandLine, price, verdict };
else start(document.getElementById("calculator"), window.planChoices, window.planData, "plans/");
