// Print the protocol schemas that the official suite carries, as one JSON object
// {revision: schema}. They are object literals inside its bundled script; each is
// cut out by matching braces and evaluated by itself, in an empty context.
//
// usage: node read_schemas.js path/to/dist/index.js
const fs = require("node:fs");
const vm = require("node:vm");

const source = fs.readFileSync(process.argv[2], "utf8");

// The end of the object literal that starts at `start`: braces count outside strings.
function literalEnd(start) {
  let depth = 0;
  let quote = null;
  for (let at = start; at < source.length; at++) {
    const char = source[at];
    if (quote) {
      if (char === "\\") at++;
      else if (char === quote) quote = null;
    } else if ("`\"'".includes(char)) quote = char;
    else if ("{[".includes(char)) depth++;
    else if ("}]".includes(char) && --depth === 0) return at + 1;
  }
  throw new Error("an object literal without end");
}

function schemaNamed(name) {
  const declared = new RegExp(`[ ,]${name.replace("$", "\\$")}=(?=\\{\\$schema:)`).exec(source);
  if (!declared) throw new Error(`no schema is called ${name}`);
  const start = declared.index + declared[0].length;
  return vm.runInNewContext(`(${source.slice(start, literalEnd(start))})`);
}

// The revision that a key of the table is: written out, or the name of a constant in brackets.
function revisionOf(key) {
  if (key.startsWith('"')) return key.slice(1, -1);
  const name = key.slice(1, -1).replace("$", "\\$");
  const declared = new RegExp(`[ ,]${name}=[\`"'](\\d{4}-\\d\\d-\\d\\d)[\`"']`).exec(source);
  if (!declared) throw new Error(`no revision is called ${key}`);
  return declared[1];
}

// The bundle has one table from revision to schema: {"2025-03-26":A,"2025-06-18":B,[C]:D,...}
const table = /\{(?:(?:"\d{4}-\d\d-\d\d"|\[[\w$]+\]):[\w$]+,?){2,}\}/.exec(source);
if (!table) throw new Error("the suite no longer has a table of schemas");
const schemas = {};
for (const [, key, name] of table[0].matchAll(/("\d{4}-\d\d-\d\d"|\[[\w$]+\]):([\w$]+)/g)) {
  schemas[revisionOf(key)] = schemaNamed(name);
}
console.log(JSON.stringify(schemas));
