/**
 * Which server a program talks to: the `server` option, else CLOCHE_URL, else the one that `cloche serve` starts on this machine,
 * with the key that it keeps in its state directory. That key goes nowhere else. A server that was named and does not answer is an error.
 */

import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";

import { error } from "./errors.js";

export interface Address {
  url: URL;
  apiKey: string | undefined;
}

const DEFAULT = "http://127.0.0.1:7777";

export function find(server: string | undefined, apiKey: string | undefined): Address {
  const key = apiKey ?? (process.env["CLOCHE_API_KEY"] || undefined);
  const named = server ?? (process.env["CLOCHE_URL"] || undefined);
  return named === undefined ? { url: new URL(DEFAULT), apiKey: key ?? localKey() } : { url: parse(named), apiKey: key };
}

function parse(address: string): URL {
  if (address.startsWith("unix:")) {
    throw error("server_unavailable", `${address} is a keeper's socket, and that does not speak HTTP`, {
      hint: "start `cloche serve` and use its http:// address",
    });
  }
  let url: URL | undefined;
  try {
    url = new URL(address);
  } catch {
    url = undefined;
  }
  if (url === undefined || (url.protocol !== "http:" && url.protocol !== "https:")) {
    throw error("server_unavailable", `'${address}' is not the address of a server`, { hint: "use http://host:port or https://host" });
  }
  return url;
}

function localKey(): string {
  const file = join(home(), "keys", "default.key");
  try {
    return readFileSync(file, "utf8").trim();
  } catch (cause) {
    throw error("server_unavailable", `no server was named, and ${file} cannot be read, so none was started here`, {
      hint: "start one with `cloche serve`, or set CLOCHE_URL and CLOCHE_API_KEY",
      cause,
    });
  }
}

function home(): string {
  const set = process.env["CLOCHE_HOME"];
  if (set) return set;
  return join(process.env["XDG_STATE_HOME"] || join(homedir(), ".local", "state"), "cloche");
}
