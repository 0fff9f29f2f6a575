// Replays a race: the JSON of ssd_pipelines/race/replay.py. `element`, `props` and `watch` come from gr.HTML.
const FINAL = 1, REPLACED = 2, SHEET_COLUMNS = 8;
const part = (name) => element.querySelector(`[data-part="${name}"]`);
let race = null, lanes = [], clock = 0, end = 1, playing = false, before = null, generation = 0;

function load(value) {
  race = value && value.lanes ? value : null;
  const mine = ++generation;
  playing = false;
  clock = 0;
  part("lanes").replaceChildren();
  lanes = [];
  part("title").textContent = race ? `${race.prompt} · seed ${race.seed}` : "";
  part("note").textContent = "";
  if (!race) return;
  end = Math.max(...race.lanes.map((lane) => lane.seconds.at(-1)));
  const where = [race.model, race.machine].filter(Boolean).join(", ");
  part("note").textContent = "The decoders were recorded one after the other, so that none slows another down, and are "
    + `replayed together. Time without decoding to pixels. ${where ? `Recorded with ${where}.` : ""}`;
  lanes = race.lanes.map((data, index) => makeLane(data, index));
  const sheets = lanes.map((lane) => lane.sheet.decode().catch(() => {}));
  Promise.all(sheets).then(() => {
    if (mine !== generation) return;
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (still) { clock = end; draw(); } else start();
  });
  draw();
}

function makeLane(data, index) {
  const item = document.createElement("li"), title = document.createElement("h3");
  const canvas = document.createElement("canvas"), count = document.createElement("p"), same = document.createElement("p");
  title.textContent = data.title;
  canvas.setAttribute("role", "img");
  canvas.style.aspectRatio = `${race.columns} / ${race.rows}`;
  new ResizeObserver(() => { lanes.forEach((lane) => { lane.drawn = -1; }); draw(); }).observe(canvas);
  same.className = "same";
  item.append(title, canvas, count, same);
  part("lanes").append(item);
  const sheet = new Image();
  sheet.src = data.sheet;
  return { data, index, canvas, count, same, sheet, cells: new Int8Array(race.rows * race.columns), passes: 0, drawn: -1 };
}

// 0: no token; else 1 + flags of the last change.
function stateAfter(lane, passes) {
  if (passes < lane.passes) { lane.cells.fill(0); lane.passes = 0; }
  for (; lane.passes < passes; lane.passes++)
    for (const change of lane.data.changes[lane.passes]) lane.cells[change >> 2] = 1 + (change & FINAL);
  return lane.cells;
}

function drawLane(lane) {
  const { data, canvas } = lane, total = data.seconds.length;
  let passes = 0;
  while (passes < total && data.seconds[passes] <= clock + 1e-9) passes++;
  lane.count.textContent = `pass ${passes} of ${total} · ${Math.min(clock, data.seconds.at(-1)).toFixed(2)} s`;
  const done = passes === total;
  lane.count.classList.toggle("done", done);
  lane.same.textContent = done && lane.index
    ? (data.matches ? "✓ same codes as the first" : "differs from the first") : "";
  if (!canvas.clientWidth || (passes === lane.drawn && lane.sheet.complete === lane.complete)) return;
  const pixels = window.devicePixelRatio || 1;
  canvas.width = Math.round(canvas.clientWidth * pixels);
  canvas.height = Math.round(canvas.clientHeight * pixels);
  lane.drawn = passes;
  lane.complete = lane.sheet.complete;
  canvas.setAttribute("aria-label", `${data.title}: picture after ${passes} of ${total} passes`);
  const cells = stateAfter(lane, passes), context = canvas.getContext("2d");
  const width = canvas.width / race.columns, height = canvas.height / race.rows;
  context.lineWidth = pixels;
  const shown = data.shown.filter((index) => index < passes).length - 1;
  if (shown >= 0 && lane.sheet.complete) {
    context.imageSmoothingEnabled = data.width * 2 > canvas.width;
    const left = (shown % SHEET_COLUMNS) * data.width, top = Math.floor(shown / SHEET_COLUMNS) * data.height;
    context.drawImage(lane.sheet, left, top, data.width, data.height, 0, 0, canvas.width, canvas.height);
  }
  const replaced = new Set();
  if (passes && !done)
    for (const change of data.changes[passes - 1]) if (change & REPLACED) replaced.add(change >> 2);
  for (let cell = 0; cell < cells.length; cell++) {
    const x = (cell % race.columns) * width, y = Math.floor(cell / race.columns) * height;
    if (cells[cell] === 0) context.clearRect(x, y, width, height);
    if (cells[cell] === 1) { context.fillStyle = "rgba(37, 99, 235, .35)"; context.fillRect(x, y, width, height); }
    if (replaced.has(cell)) { context.fillStyle = "rgba(234, 88, 12, .65)"; context.fillRect(x, y, width, height); }
    if (cells[cell] < 1 + FINAL && width >= 8) {
      context.strokeStyle = "rgba(150, 158, 172, .6)";
      context.strokeRect(x + .5, y + .5, width, height);
    }
  }
}

function draw() {
  lanes.forEach(drawLane);
  const slider = part("time");
  if (slider) {
    slider.value = String(Math.round(1000 * clock / end));
    slider.setAttribute("aria-valuetext", `${clock.toFixed(2)} seconds`);
    part("clock").textContent = `${clock.toFixed(2)} s`;
    part("play").textContent = playing ? "Pause" : clock >= end ? "Replay" : "Play";
  }
}

function start() {
  if (clock >= end) clock = 0;
  playing = true;
  before = null;
  draw();
  const mine = generation;
  requestAnimationFrame(function tick(now) {
    if (!playing || mine !== generation) return;
    const rate = part("speed").value === "real" ? 1 : end / 8;
    if (before !== null) clock = Math.min(end, clock + rate * (now - before) / 1000);
    before = now;
    if (clock >= end) playing = false;
    draw();
    if (playing) requestAnimationFrame(tick);
  });
}

element.addEventListener("click", (event) => {
  if (event.target.dataset.part !== "play" || !race) return;
  if (playing) { playing = false; draw(); } else start();
});
element.addEventListener("input", (event) => {
  if (event.target.dataset.part !== "time" || !race) return;
  playing = false;
  clock = end * Number(event.target.value) / 1000;
  draw();
});
watch("value", () => load(props.value));
load(props.value);
