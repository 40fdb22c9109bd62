// Looks at every page of site/ in Chromium, light and dark, wide and narrow: what axe-core finds, pages wider than the window,
// errors of scripts and requests to other hosts. Pictures of all pages go beside it. Run by `make site-check`:
//   node site_check.mjs SITE [PAGE …], in a folder with puppeteer-core and axe-core installed
import { readFileSync, readdirSync, mkdirSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(join(process.cwd(), "x.js")));
const puppeteer = require("puppeteer-core").default ?? require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const SERIOUS = ["serious", "critical"];
const WINDOWS = { wide: { width: 1400, height: 900 }, narrow: { width: 400, height: 844 } };

const MOST_PIXELS = 4000;  // of a page's height, in its picture

const site = resolve(process.argv[2]);
const pages = process.argv.length > 3 ? process.argv.slice(3)
  : readdirSync(site, { recursive: true }).filter((name) => name.endsWith(".html") && name !== "404.html");  // a server's page

const TYPES = { html: "text/html", css: "text/css", js: "text/javascript", json: "application/json", png: "image/png" };
const server = createServer((request, response) => {
  const name = decodeURI(new URL(request.url, "http://here").pathname).slice(1);
  response.setHeader("Content-Type", TYPES[name.split(".").at(-1)] ?? "application/octet-stream");
  try { response.end(readFileSync(join(site, name))); } catch { response.writeHead(404).end(); }
});
await new Promise((listens) => server.listen(0, "127.0.0.1", listens));
const here = `http://127.0.0.1:${server.address().port}/`;

// One line for each serious fault of a page as it is shown.
async function faults(tab, name) {
  const found = [];
  const wrong = (error) => found.push(`script: ${error.message}`);
  const own = [here, "data:"];
  const asked = (request) => { if (!own.some((start) => request.url().startsWith(start))) found.push(`asks another host: ${request.url()}`); };
  tab.on("pageerror", wrong);
  tab.on("request", asked);
  await tab.goto(here + name, { waitUntil: "load" });
  await tab.evaluate(axe);
  const { violations } = await tab.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  for (const rule of violations.filter((each) => SERIOUS.includes(each.impact)))
    found.push(`${rule.id} (${rule.impact}, ${rule.nodes.length} ×): ${rule.help}: ${rule.nodes[0].html.slice(0, 160)} ` +
      rule.nodes[0].failureSummary.split("\n")[1].trim());
  const over = await tab.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  if (over > 0) found.push(`${over} pixels wider than the window`);
  tab.off("pageerror", wrong);
  tab.off("request", asked);
  return found;
}

// With a mouse, which a browser without a window lacks: the theme lets the keyboard reach what scrolls only then.
const mouse = "primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4";
const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", `--blink-settings=${mouse}`] });
let count = 0;
for (const scheme of ["light", "dark"]) for (const [size, viewport] of Object.entries(WINDOWS)) {
  const context = await browser.createBrowserContext();  // which remembers no scheme of the one before
  const tab = await context.newPage();
  await tab.setViewport(viewport);
  await tab.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  const folder = join(process.cwd(), `${scheme}-${size}`);
  mkdirSync(folder, { recursive: true });
  for (const name of pages) {
    for (const fault of await faults(tab, name)) { count += 1; console.log(`${name}, ${scheme}, ${size}: ${fault}`); }
    const height = Math.min(await tab.evaluate(() => document.documentElement.scrollHeight), MOST_PIXELS);
    const clip = { x: 0, y: 0, width: viewport.width, height };
    await tab.screenshot({ path: join(folder, `${name.replaceAll("/", "-")}.png`), clip, captureBeyondViewport: true });
  }
  await context.close();
}
await browser.close();
server.close();
console.log(`${pages.length} pages, light and dark, wide and narrow: ${count} serious faults`);
process.exit(count ? 1 : 0);
