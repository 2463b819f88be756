/* The table of measured-ops.md, made of measured-ops.json: a filter by name and by what was found,
   and the counts of each kind of placements where a row is opened. Nothing else is loaded. */
(async () => {
  const root = document.getElementById("measured-ops");
  const answer = await fetch(root.dataset.source);
  if (!answer.ok) return;
  const data = await answer.json();
  const kinds = Object.keys(data.totals);

  const make = (tag, attributes = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  };
  const total = (op, way) =>
    kinds.reduce((sum, k) => sum.map((n, i) => n + (op[k] ? op[k][way][i] : 0)), [0, 0, 0]);
  const text = (counts) => counts.join("/");
  const notRight = (counts) => counts[1] + counts[2];
  const better = (op) => notRight(total(op, "stock")) > notRight(total(op, "ours"));

  const choices = {
    "all ops": () => true,
    "better with cute-sharding": better,
    "PyTorch is wrong": (op) => total(op, "stock")[1] > 0,
    "not right with cute-sharding": (op) => notRight(total(op, "ours")) > 0,
  };
  const name = make("input", { type: "search", placeholder: "name of an op", ariaLabel: "Name" });
  const choice = make("select", { ariaLabel: "Which ops" });
  choice.append(...Object.keys(choices).map((label) => make("option", { value: label }, label)));
  const count = make("output");
  const body = make("tbody");
  const heads = ["op", "PyTorch", "cute-sharding", "answered by"];
  const table = make(
    "table",
    {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head)))),
    body,
  );

  const details = (op) => {
    const cells = kinds
      .filter((kind) => op[kind])
      .map((kind) => `${kind}: ${text(op[kind].stock)} → ${text(op[kind].ours)}`);
    return make("tr", { hidden: true }, make("td", { colSpan: 4 }, cells.join("; ")));
  };
  const rows = data.ops.map((op) => {
    const more = details(op);
    const open = make("button", { type: "button", title: "by placements" }, op.op);
    open.setAttribute("aria-expanded", "false");
    open.addEventListener("click", () => {
      more.hidden = !more.hidden;
      open.setAttribute("aria-expanded", String(!more.hidden));
    });
    const cells = [open, text(total(op, "stock")), text(total(op, "ours")), op.by || "torch"];
    return { op, more, row: make("tr", {}, ...cells.map((cell) => make("td", {}, cell))) };
  });

  const filter = () => {
    const wanted = name.value.trim().toLowerCase();
    const shown = rows.filter(
      ({ op }) => op.op.toLowerCase().includes(wanted) && choices[choice.value](op),
    );
    for (const { more } of rows) more.hidden = true;
    body.replaceChildren(...shown.flatMap(({ row, more }) => [row, more]));
    count.value = `${shown.length} of ${rows.length} ops; right/wrong/raises, all placements together`;
  };
  name.addEventListener("input", filter);
  choice.addEventListener("change", filter);
  root.replaceChildren(make("p", { className: "filter" }, name, choice, count), table);
  filter();
})();
