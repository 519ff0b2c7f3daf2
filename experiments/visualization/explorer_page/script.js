"use strict";
// The data: {sentences: [{text, pairs: [{run, text, translation, source,
// target, gold, weights: {kind: {shape: [L, H, T, S], data}}}]}]}, where arrays
// are base64 of little-endian float32 (weights) or uint8 (gold: 1 possible, 2
// sure).
const {sentences} = JSON.parse(document.getElementById("data").textContent);
const KINDS = [
  ["cross-attention", "cross"],
  ["encoder self-attention", "encoder"],
  ["decoder self-attention", "decoder"],
];
const SVG = "http://www.w3.org/2000/svg";
const RIGHT_TO_LEFT =
  /^\P{L}*[\p{sc=Arab}\p{sc=Hebr}\p{sc=Syrc}\p{sc=Thaa}\p{sc=Nkoo}\p{sc=Adlm}]/u;
const FAINT = 0.01; // lines of smaller weights are not drawn
const state = {sentence: 0, kind: KINDS[0][0], heads: [], pinned: false};
let panels = [];

const $ = (id) => document.getElementById(id);
const shown = (token) => token.trim() ? token : "␣";
const isRightToLeft = (tokens) => RIGHT_TO_LEFT.test(tokens.join(" "));
const color = (weight) => weight < 0 ? "var(--negative)" : "var(--weight)";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (name in made && name !== "dir") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// The tokens of the rows and columns of a pair's weights.
function axes(pair, kind) {
  const [rows, columns] = {
    "cross-attention": [pair.target, pair.source],
    "encoder self-attention": [pair.source, pair.source],
    "decoder self-attention": [pair.target, ["<s>", ...pair.target.slice(0, -1)]],
  }[kind];
  const names = {
    "cross-attention": ["target", "source"],
    "encoder self-attention": ["source token", "attends to"],
    "decoder self-attention": ["target", "decoder input"],
  }[kind];
  return {rows, columns, names};
}

// The weights of a head as {rows, columns, at(t, s)}; the head after the last
// one is the mean of a layer's heads.
function matrix(pair, kind, layer, head) {
  const stored = pair.weights[kind];
  stored.values ??= new Float32Array(bytes(stored.data).buffer);
  const [, heads, rows, columns] = stored.shape;
  const size = rows * columns;
  const start = (index) => (layer * heads + index) * size;
  if (head < heads) {
    const values = stored.values.subarray(start(head), start(head) + size);
    return {rows, columns, at: (t, s) => values[t * columns + s]};
  }
  const mean = new Float32Array(size);
  for (let index = 0; index < heads; index++)
    for (let i = 0; i < size; i++)
      mean[i] += stored.values[start(index) + i] / heads;
  return {rows, columns, at: (t, s) => mean[t * columns + s]};
}

// The column of the largest positive weight of each row, or -1.
function predictedAlignment(weights) {
  return Array.from({length: weights.rows}, (_, t) => {
    let best = -1;
    for (let s = 0; s < weights.columns; s++)
      if (weights.at(t, s) > (best < 0 ? 0 : weights.at(t, best))) best = s;
    return best;
  });
}

// 1 - (|A and S| + |A and P|) / (|A| + |S|), see Och and Ney (2003).
function alignmentErrorRate(predicted, gold, columns) {
  let aligned = 0, sure = 0, right = 0;
  predicted.forEach((best, t) => {
    const row = gold.subarray(t * columns, (t + 1) * columns);
    sure += row.filter((value) => value === 2).length;
    if (best < 0 || !row.some((value) => value)) return;
    aligned += 1;
    right += row[best];
  });
  return 1 - right / Math.max(aligned + sure, 1);
}

function goldOf(pair) {
  if (!pair.gold || state.kind !== "cross-attention") return null;
  return bytes(pair.gold);
}

class Panel {
  constructor(pair, index) {
    Object.assign(this, {pair, index});
    this.node = element("section", {className: "panel", ariaLabel: pair.run});
    this.build();
  }

  get shape() { return this.pair.weights[state.kind]?.shape; }

  get head() {
    const [layers, heads] = this.shape;
    const [layer, head] = state.heads[this.index] ?? [layers - 1, 0];
    const most = heads > 1 ? heads : 0;
    return [Math.min(layer, layers - 1), Math.min(head, most)];
  }

  build() {
    const {pair} = this;
    this.readout = element("p", {className: "readout", ariaLive: "polite"});
    this.views = element("div", {className: "views"});
    this.node.replaceChildren(
      element("h2", {}, pair.run),
      element("p", {className: "texts"},
        element("span", {dir: "auto"}, pair.text),
        element("span", {className: "arrow"}, " → "),
        element("span", {dir: "auto"}, pair.translation)),
    );
    if (!this.shape) {
      this.node.append(element("p", {}, `no ${state.kind}`));
      return;
    }
    const [layers, heads] = this.shape;
    this.node.append(this.picker(layers, heads), this.readout, this.views);
    this.draw();
  }

  picker(layers, heads) {
    const group = element("div", {
      className: "heads", role: "radiogroup", ariaLabel: "layer and head",
    });
    this.buttons = [];
    for (let layer = 0; layer < layers; layer++) {
      const row = element("div", {className: "layer"},
        element("span", {}, `layer ${layer + 1}`));
      for (let head = 0; head < heads + (heads > 1); head++) {
        const name = head < heads ? `head ${head + 1}` : "mean of heads";
        const button = element("button", {
          className: head < heads ? "head" : "head mean", role: "radio",
          ariaLabel: `layer ${layer + 1}, ${name}`,
          title: `layer ${layer + 1}, ${name}`,
          onclick: () => this.choose(layer, head),
          onkeydown: (event) => this.step(event, layer, head),
        }, thumbnail(matrix(this.pair, state.kind, layer, head),
          isRightToLeft(axes(this.pair, state.kind).columns)));
        this.buttons.push({layer, head, button});
        row.append(button);
      }
      group.append(row);
    }
    return group;
  }

  choose(layer, head) {
    const found = this.buttons.find(
      (each) => each.layer === layer && each.head === head);
    if (!found) return;
    state.heads[this.index] = [layer, head];
    this.draw();
    found.button.focus();
  }

  step(event, layer, head) {
    const [down, right] = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    }[event.key] ?? [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    this.choose(layer + down, head + right);
  }

  // Draws the weights of the chosen head.
  draw() {
    const {pair} = this, [layer, head] = this.head;
    for (const each of this.buttons ?? []) {
      const chosen = each.layer === layer && each.head === head;
      each.button.setAttribute("aria-checked", chosen);
      each.button.tabIndex = chosen ? 0 : -1;
    }
    this.weights = matrix(pair, state.kind, layer, head);
    this.predicted = predictedAlignment(this.weights);
    this.gold = goldOf(pair);
    this.views.replaceChildren(this.lines(), this.map());
    this.highlight(null);
  }

  tokens(side, tokens) {
    const list = element("ol", {className: side});
    this[side] = tokens.map((token, index) => {
      const button = element("button", {
        className: "token", tabIndex: index ? -1 : 0,
        onpointerenter: () => point(this, {side, index}),
        onpointerleave: () => point(this, null),
        onfocus: () => point(this, {side, index}),
        onblur: () => point(this, null),
        onclick: () => pin(this, {side, index}),
        onkeydown: (event) => this.move(event, side, index),
      },
      element("span", {className: "text", dir: "auto"}, shown(token)),
      element("span", {className: "value"}));
      list.append(element("li", {}, button));
      return button;
    });
    return list;
  }

  move(event, side, index) {
    const other = side === "rows" ? "columns" : "rows";
    const step = {ArrowUp: -1, ArrowDown: 1}[event.key];
    const crosses = event.key === "ArrowLeft" || event.key === "ArrowRight";
    if (!step && !crosses) return;
    event.preventDefault();
    const list = this[crosses ? other : side];
    const to = crosses ? Math.min(index, list.length - 1) : index + step;
    list[to]?.focus();
  }

  lines() {
    const {rows, columns, names} = axes(this.pair, state.kind);
    const height = Math.max(rows.length, columns.length);
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 10 ${height}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    this.svg.style.height = `calc(var(--row) * ${height})`;
    return element("div", {className: "lines"},
      element("h3", {}, names[1]), element("h3", {}, names[0]),
      this.tokens("columns", columns), this.svg, this.tokens("rows", rows));
  }

  // Draws the lines of the rows or columns that `active` leaves.
  drawLines(active) {
    const paths = [];
    const line = (t, s, className, style = "") =>
      paths.push(`<path class="${className}" style="${style}" d="M0 ${s + .5}` +
        `C5 ${s + .5} 5 ${t + .5} 10 ${t + .5}"/>`);
    for (let t = 0; t < this.weights.rows; t++) {
      for (let s = 0; s < this.weights.columns; s++) {
        if (active && (active.side === "rows" ? t : s) !== active.index) continue;
        const weight = this.weights.at(t, s), size = Math.abs(weight);
        if (size >= FAINT) {
          line(t, s, weight < 0 ? "negative" : "",
            `stroke-opacity:${Math.min(size, 1)};stroke-width:${1 + 3 * size}`);
        }
        const gold = this.gold?.[t * this.weights.columns + s];
        if (gold && $("gold").checked)
          line(t, s, gold === 2 ? "gold" : "gold possible");
        if (this.predicted[t] === s && $("predicted").checked)
          line(t, s, "predicted");
      }
    }
    this.svg.innerHTML = paths.join("");
  }

  map() {
    const {rows, columns, names} = axes(this.pair, state.kind);
    const label = (scope, token) => element("th", {scope}, element("span",
      {dir: "auto", className: token.length > 2 ? "" : "short"}, shown(token)));
    this.columnLabels = columns.map((token) => label("col", token));
    this.rowLabels = rows.map((token) => label("row", token));
    this.body = element("tbody");
    this.cells = rows.map((_, t) => columns.map((_, s) => {
      const weight = this.weights.at(t, s);
      const cell = element("td", {
        "--w": Math.min(Math.abs(weight), 1), "--color": color(weight),
        onpointerenter: () => point(this, {side: "rows", index: t, column: s}),
        onpointerleave: () => point(this, null),
        onclick: () => pin(this, {side: "rows", index: t, column: s}),
      });
      cell.dataset.weight = weight;
      const gold = this.gold?.[t * columns.length + s];
      if (gold && $("gold").checked)
        cell.classList.add(gold === 2 ? "gold" : "possible");
      if (this.predicted[t] === s && $("predicted").checked)
        cell.classList.add("predicted");
      return cell;
    }));
    this.body.append(...this.cells.map((cells, t) =>
      element("tr", {}, this.rowLabels[t], ...cells)));
    const table = element("table", {},
      element("caption", {}, `${names[0]} (rows), ${names[1]} (columns)`),
      element("thead", {}, element("tr", {}, element("td"),
        ...this.columnLabels)),
      this.body);
    table.querySelector("thead td").style.background = "none";
    table.dir = isRightToLeft(columns) ? "rtl" : "ltr";
    return element("div", {className: "map", "--count": columns.length}, table);
  }

  // Shows the weights of one token: of `side` ("rows" or "columns") at `index`.
  highlight(active) {
    if (!this.shape) return;
    this.drawLines(active);
    this.body.classList.toggle("dimmed", active !== null);
    this.cells.forEach((cells, t) => cells.forEach((cell, s) => {
      const own = active && (active.side === "rows" ? t : s) === active.index;
      cell.classList.toggle("active", Boolean(own));
      cell.classList.toggle("point", Boolean(own) && active.column === s);
    }));
    for (const side of ["rows", "columns"]) {
      const labels = side === "rows" ? this.rowLabels : this.columnLabels;
      this[side].forEach((button, index) => {
        const own = active?.side === side && active.index === index;
        const bar = active && active.side !== side;
        button.classList.toggle("active", own);
        labels[index].classList.toggle("active", own ||
          (side === "columns" && active?.column === index));
        button.classList.toggle("bar", Boolean(bar));
        const weight = bar ? this.weight(active, index) : 0;
        button.style.setProperty("--w", Math.min(Math.abs(weight), 1));
        button.style.setProperty("--color", color(weight));
        button.lastChild.textContent = bar ? weight.toFixed(2) : "";
      });
    }
    this.describe(active);
  }

  weight(active, index) {
    return active.side === "rows"
      ? this.weights.at(active.index, index)
      : this.weights.at(index, active.index);
  }

  describe(active) {
    const [layer, head] = this.head, heads = this.shape[1];
    const name = head < heads ? `head ${head + 1}` : "mean of heads";
    const parts = [`Layer ${layer + 1}, ${name}. `];
    if (this.gold) {
      const rate = alignmentErrorRate(
        this.predicted, this.gold, this.weights.columns);
      parts.push(`Alignment error rate ${(100 * rate).toFixed(1)}%. `);
    }
    if (active) {
      const {rows, columns} = axes(this.pair, state.kind);
      const [own, others] =
        active.side === "rows" ? [rows, columns] : [columns, rows];
      const bold = (token) => element("b", {dir: "auto"}, shown(token));
      const order = others.map((_, index) => index).sort((one, other) =>
        this.weight(active, other) - this.weight(active, one));
      const named = active.column === undefined
        ? order.slice(0, 3) : [active.column];
      parts.push(bold(own[active.index]),
        active.side === "rows" ? " attends to " : " receives from ");
      named.forEach((index, rank) => parts.push(rank ? ", " : "",
        bold(others[index]), ` ${this.weight(active, index).toFixed(3)}`));
    }
    this.readout.replaceChildren(...parts);
  }
}

function thumbnail(weights, mirrored) {
  const canvas = element("canvas", {
    width: weights.columns, height: weights.rows,
  });
  if (mirrored) canvas.style.transform = "scaleX(-1)";
  const style = getComputedStyle(document.documentElement);
  const context = canvas.getContext("2d");
  for (let t = 0; t < weights.rows; t++) {
    for (let s = 0; s < weights.columns; s++) {
      const weight = weights.at(t, s);
      context.fillStyle = style.getPropertyValue(
        weight < 0 ? "--negative" : "--weight");
      context.globalAlpha = Math.min(Math.abs(weight), 1);
      context.fillRect(s, t, 1, 1);
    }
  }
  return canvas;
}

// Highlights a token, in the other runs too where they have it at its place.
function highlight(panel, active) {
  const token = active && axes(panel.pair, state.kind)[active.side][active.index];
  for (const each of panels) {
    const shares = active && each.shape &&
      axes(each.pair, state.kind)[active.side][active.index] === token;
    each.highlight(each === panel || shares ? active : null);
  }
}

function point(panel, active) {
  if (!state.pinned) highlight(panel, active);
}

function pin(panel, active) {
  const key = JSON.stringify([panels.indexOf(panel), active]);
  state.pinned = state.pinned === key ? false : key;
  highlight(panel, active);
}

function release() {
  state.pinned = false;
  if (panels.length) highlight(panels[0], null);
}

function render() {
  state.pinned = false;
  const {pairs} = sentences[state.sentence];
  const has = (kind) => pairs.some((pair) => pair.weights[kind]);
  if (!has(state.kind)) state.kind = (KINDS.find(([kind]) => has(kind)) ?? KINDS[0])[0];
  $("sentence").value = state.sentence;
  for (const input of $("kinds").querySelectorAll("input")) {
    input.disabled = !has(input.value);
    input.checked = input.value === state.kind;
  }
  $("gold").parentNode.hidden = !pairs.some(goldOf);
  // Panels side by side have equal heights above their weights.
  const layers = pairs.map((pair) => pair.weights[state.kind]?.shape[0] ?? 0);
  $("panels").style.setProperty("--layers", Math.max(...layers));
  panels = pairs.map((pair, index) => new Panel(pair, index));
  $("panels").replaceChildren(...panels.map((panel) => panel.node));
}

function start() {
  sentences.forEach(({text}, index) => $("sentence").append(
    element("option", {value: index, dir: "auto"}, `${index + 1}. ${text}`)));
  for (const [kind, name] of KINDS) {
    $("kinds").append(element("label", {title: kind}, element("input", {
      type: "radio", name: "kind", value: kind,
      onchange: () => { state.kind = kind; render(); },
    }), name));
  }
  const go = (step) => {
    const count = sentences.length;
    state.sentence = (state.sentence + step + count) % count;
    render();
  };
  $("previous").onclick = () => go(-1);
  $("next").onclick = () => go(1);
  $("sentence").onchange = () => {
    state.sentence = Number($("sentence").value);
    render();
  };
  $("gold").checked = true;
  for (const id of ["gold", "predicted"]) $(id).onchange = render;
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") release();
  });
  matchMedia("(prefers-color-scheme: dark)").onchange = render;
  const signed = sentences.some(({pairs}) => pairs.some(({weights}) =>
    Object.values(weights).some(({signed}) => signed)));
  $("scale").classList.toggle("signed", signed);
  $("scale").append(signed ? "weight −1" : "weight 0", element("i"), "1");
  render();
}

start();
