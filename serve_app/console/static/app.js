// The shell: navigation by the address's hash, login, theme. A page is a module in pages/ with a
// default export of a component that receives {session}.

import {LOGGED_OUT, getJson, postJson} from "./api.js";
import {Button, ErrorText, Field, has} from "./ui.js";
import {html, render, useCallback, useEffect, useRef, useState} from "./vendor/preact.js";

// `isFor`: whom else a page is for, besides the scope.
const PAGES = [
  {id: "overview", title: "Overview", scope: "admin:read"},
  {id: "adapters", title: "Adapters", scope: "admin:read"},
  {id: "playground", title: "Playground", scope: "infer"},
  {id: "canaries", title: "Canaries", scope: "admin:read"},
  {id: "keys", title: "Keys and usage", scope: "admin:read"},
  {id: "registry", title: "Registry", scope: "admin:read"},
  {id: "usage", title: "Usage", scope: "infer",
    isFor: (session) => session.tenancy_enabled && !has(session, "admin:read")},
];
const LOGIN = {id: "login", title: "Log in"};
const THEMES = [["auto", "System theme"], ["light", "Light theme"], ["dark", "Dark theme"]];
const THEME_KEY = "loraplex-theme";
const RETRY_MS = 5000;

function App() {
  const [session, setSession] = useState(null);
  const [error, setError] = useState(null);
  const [ended, setEnded] = useState(null); // why the last login does not count any more
  const [hash, setHash] = useState(location.hash);
  const load = useCallback(async () => {
    try {
      setSession(await getJson("/console/session"));
      setError(null);
    } catch (failure) {
      setError(failure);
      setTimeout(load, RETRY_MS);
    }
  }, []);
  useEffect(() => {
    load();
    const follow = () => setHash(location.hash);
    const end = (event) => {
      setEnded(event.detail);
      load();
    };
    window.addEventListener("hashchange", follow);
    window.addEventListener(LOGGED_OUT, end);
    return () => {
      window.removeEventListener("hashchange", follow);
      window.removeEventListener(LOGGED_OUT, end);
    };
  }, []);
  const main = useRef(null);
  const wanted = hash.replace(/^#\//, "").split(/[/?]/)[0];
  const pages = session === null ? [] : PAGES.filter((page) => page.isFor?.(session) ?? true);
  const open = pages.filter((page) => has(session, page.scope));
  let page = pages.find((one) => one.id === wanted);
  if (session === null) page = null;
  else if (wanted === LOGIN.id && session.needs_login) page = LOGIN;
  else if (page && !open.includes(page)) page = session.needs_login ? LOGIN : {...page, isClosed: true};
  else if (!page) page = session.needs_login ? LOGIN : open[0] ?? null;
  const id = page?.id;
  useEffect(() => {
    if (page) document.title = `${page.title} · loraplex`;
  }, [id]);
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  const logOut = async () => {
    setEnded(null);
    try {
      await postJson("/console/logout");
      await load();
    } catch (failure) {
      setError(failure);
    }
  };
  const logIn = (answer) => {
    setEnded(null);
    setSession(answer);
    if (wanted === LOGIN.id) location.hash = "#/";
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header>
      <p class="name">loraplex</p>
      <nav aria-label="Pages"><ul>
        ${open.map((one) => html`<li key=${one.id}><a href=${`#/${one.id}`}
          aria-current=${one.id === id ? "page" : undefined}>${one.title}</a></li>`)}
        ${session?.needs_login && html`<li key="login"><a href="#/login"
          aria-current=${id === "login" ? "page" : undefined}>Log in</a></li>`}
      </ul></nav>
      <div class="tools">
        <${Theme} />
        ${session?.key_id && html`<span class="who" title=${`Key ${session.key_id}`}>${session.tenant || session.key_id}</span>
          <${Button} onClick=${logOut}>Log out</${Button}>`}
      </div>
    </header>
    <main ref=${main} id="main" tabindex="-1">
      <${ErrorText} error=${error} />
      ${page === LOGIN && html`<${Login} session=${session} ended=${ended} onLogin=${logIn} />`}
      ${page?.isClosed && html`<h1>${page.title}</h1><p>This key lacks the scope <code>${page.scope}</code>.</p>`}
      ${page && page !== LOGIN && !page.isClosed && html`
        <${Lazy} key=${`${id} ${session.key_id}`} page=${page} session=${session} />`}
      ${session && !page && html`<h1>No access</h1><p>This key has no scope with a page.</p>`}
    </main>`;
}

function Lazy({page, session}) {
  const [Page, setPage] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    import(`./pages/${page.id}.js`).then(
      (module) => setPage(() => module.default),
      // After an upgrade the server has other files.
      () => setError(new Error("The page could not be loaded; load the console again.")),
    );
  }, []);
  if (error) return html`<${ErrorText} error=${error} />`;
  return Page ? html`<${Page} session=${session} />` : html`<p class="hint">Loading…</p>`;
}

function Login({session, ended, onLogin}) {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const [isSent, setIsSent] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setIsSent(true);
    try {
      onLogin(await postJson("/console/login", {key}));
    } catch (failure) {
      setError(failure);
      setIsSent(false);
    }
  };
  const hint = session.tenancy_enabled
    ? "The admin token, or a key. The pages depend on its scopes."
    : "The admin token: the value of LORAPLEX_ADMIN_TOKEN, or the file admin_token in the server's home.";
  return html`<form class="login" onSubmit=${submit}>
    <h1>Log in</h1>
    <${Field} label="Key" type="password" name="key" autocomplete="current-password" required
      spellcheck="false" hint=${hint} value=${key} onInput=${setKey} />
    <${ErrorText} error=${error ?? ended} />
    <${Button} type="submit" kind="primary" disabled=${isSent}>Log in</${Button}>
  </form>`;
}

// null where the user allows pages to keep nothing: the theme holds until the page is left then.
function storage() {
  try {
    return localStorage;
  } catch {
    return null;
  }
}

function Theme() {
  const [theme, setTheme] = useState(() => storage()?.getItem(THEME_KEY) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    storage()?.setItem(THEME_KEY, theme);
  }, [theme]);
  return html`<select aria-label="Theme" onInput=${(event) => setTheme(event.target.value)}>
    ${THEMES.map(([value, text]) => html`
      <option key=${value} value=${value} selected=${value === theme}>${text}</option>`)}
  </select>`;
}

render(html`<${App} />`, document.getElementById("app"));
