"""The page in a real browser, as a visitor uses it: with a mouse, with the keyboard alone, on a phone, in the dark."""

import os
import re
import shutil
import time

import pytest


sync_api = pytest.importorskip(
    "playwright.sync_api", reason='a browser is driven by Playwright: pip install ".[browser]"'
)
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="part of the extra browser")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OFFLINE = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
PATIENCE = 20_000

expect = sync_api.expect
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def browser():
    with sync_api.sync_playwright() as playwright:
        own = os.path.exists(playwright.chromium.executable_path)
        if not own and CHROMIUM is None:
            pytest.skip("no Chromium here: install it, or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=None if own else CHROMIUM, args=OFFLINE)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, page):
    """Opens the page; afterwards no script has failed."""
    contexts, failures = [], []

    def open_(query: str = "", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 1000}, **options})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.on("pageerror", lambda error: failures.append(str(error)))
        tab.goto(page + query)
        expect(tab.get_by_role("heading", name="Spatially speculative decoding")).to_be_visible()
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert not failures


def counts(tab):
    return tab.locator("#race-player li p:not(.same)").all_inner_texts()


def test_a_recorded_race_plays_to_its_end_when_the_page_opens(open_page):
    tab = open_page()
    expect(tab.locator("#race-player li")).to_have_count(5)
    expect(tab.locator("#race-player").get_by_role("button")).to_have_text("Replay")
    assert counts(tab)[0].startswith("pass 256 of 256") and counts(tab)[-1].startswith("pass 13 of 13")
    expect(tab.locator("#race-player li").last).to_contain_text("same codes as the first")


def test_the_race_can_be_scrubbed_with_the_keyboard_alone(open_page):
    tab = open_page()
    slider = tab.get_by_label("Time of the race")
    slider.focus()
    tab.keyboard.press("End")
    expect(tab.locator("#race-player li").first).to_contain_text("pass 256 of 256")
    tab.keyboard.press("Home")
    expect(tab.locator("#race-player li").first).to_contain_text("pass 0 of 256")
    for _ in range(60):
        tab.keyboard.press("ArrowRight")
    assert 0 < int(re.match(r"pass (\d+)", counts(tab)[0]).group(1)) < 256
    tab.keyboard.press("Shift+Tab")
    play = tab.locator("#race-player").get_by_role("button")
    expect(play).to_be_focused()
    tab.keyboard.press("Space")
    expect(play).to_have_text("Pause")
    tab.keyboard.press("Space")
    expect(play).to_have_text("Play")


def test_the_canvas_shows_drafts_and_then_the_picture(open_page):
    tab = open_page()
    slider = tab.get_by_label("Time of the race")
    colours = """canvas => {
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let empty = 0;
      for (let at = 3; at < data.length; at += 4) empty += data[at] === 0;
      return 4 * empty / data.length;
    }"""
    canvas = tab.locator("#race-player canvas").last
    slider.focus()
    tab.keyboard.press("Home")
    assert canvas.evaluate(colours) > 0.5, "no token yet, only lines between cells"
    tab.keyboard.press("End")
    assert canvas.evaluate(colours) == 0


def test_nothing_moves_by_itself_for_who_asked_for_reduced_motion(open_page):
    tab = open_page(reduced_motion="reduce")
    expect(tab.locator("#race-player").get_by_role("button")).to_have_text("Replay")


def test_a_race_is_recorded_from_the_prompt_by_pressing_enter(open_page):
    tab = open_page()
    prompt = tab.get_by_role("textbox", name="Prompt").first
    prompt.fill("a blue ring")
    prompt.press("Enter")
    expect(tab.locator("#race-status")).to_contain_text("Recorded.")
    expect(tab.locator("#race-player")).to_contain_text("a blue ring · seed 0")
    link = tab.locator("#race-link input, #race-link textarea")
    expect(link).to_have_value(re.compile(r"tab=race&prompt=a\+blue\+ring&seed=0"))
    assert tab.url == link.input_value(), "the address bar has it, too"


def test_stop_stops(open_page, model):
    passes = []

    def slow(*_):
        passes.append(1)
        time.sleep(0.02)

    counter = model.pipe.backbone.model.language_model.register_forward_pre_hook(slow)
    try:
        tab = open_page()
        tab.get_by_role("button", name="Record a race").click()
        expect(tab.locator("#race-status")).to_contain_text("Recording Autoregressive")
        tab.get_by_role("button", name="Stop").click()
        expect(tab.locator("#race-status")).to_have_text("Stopped.")
        tab.wait_for_timeout(500)
        made = len(passes)
        tab.wait_for_timeout(1000)
        assert made == len(passes) < 400, "a whole race has 433 passes"
    finally:
        counter.remove()


def test_an_error_is_shown_in_words(open_page):
    tab = open_page()
    tab.get_by_role("textbox", name="Prompt").first.fill("   ")
    tab.get_by_role("button", name="Record a race").click()
    expect(tab.get_by_text("The prompt is empty: say what to draw")).to_be_visible()


def test_a_prompt_outside_of_the_models_words_is_drawn_with_a_warning(open_page):
    tab = open_page("?tab=generate&prompt=a+cat&seed=0")
    tab.get_by_role("button", name="Draw").click()
    expect(tab.get_by_text("The prompt 'a cat'").first).to_be_visible()
    expect(tab.locator("#generate-status")).to_contain_text("passes for 256 tokens")


def test_a_link_brings_tab_prompt_and_seed_back(open_page):
    tab = open_page("?tab=generate&prompt=two+rings&seed=41")
    visible = tab.get_by_role("textbox", name="Prompt").locator("visible=true")
    expect(visible).to_have_value("two rings")
    expect(tab.get_by_label("Seed", exact=True).locator("visible=true")).to_have_value("41")
    tab.get_by_role("button", name="Draw").click()
    expect(tab.locator("#generate-status")).to_contain_text("passes for 256 tokens")
    expect(tab.locator("#pictures")).to_contain_text("seed 41")


def test_a_broken_link_opens_the_page_as_usual(open_page):
    tab = open_page("?tab=generate&prompt=&seed=-3x&model=/etc/passwd")
    expect(tab.get_by_label("Seed", exact=True).locator("visible=true")).to_have_value("0")


def test_maps_and_drafts_are_shown_with_captions(open_page):
    tab = open_page("?tab=inside&prompt=a+ring&seed=0")
    tab.get_by_role("button", name="Inspect").click()
    expect(tab.locator("#inside-status")).to_contain_text("No code differs")
    expect(tab.locator(".figures figure")).to_have_count(8)
    expect(tab.locator(".figures")).to_contain_text(["Corrections per token", "2 rounds, "])
    expect(tab.locator(".bars rect")).to_have_count(16)
    expect(tab.get_by_role("img", name="Passes from the first draft")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_our_own_elements(open_page, theme):
    tab = open_page(f"?__theme={theme}")
    expect(tab.locator("#race-player").get_by_role("button")).to_have_text("Replay")
    found = axe.Axe().run(tab, context="#race-player").response["violations"]
    tab.get_by_role("tab", name="Look inside").click()
    tab.get_by_role("button", name="Inspect").click()
    expect(tab.locator(".figures figure")).to_have_count(8)
    for own in (".figures", ".bars"):
        found += axe.Axe().run(tab, context=own).response["violations"]
    assert [rule["id"] for rule in found if rule["impact"] in ("serious", "critical")] == []


@pytest.mark.parametrize("tab_name", ["Race", "Generate", "Look inside"])
def test_a_phone_shows_everything_without_sideways_scrolling(open_page, tab_name):
    tab = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    tab.get_by_role("tab", name=tab_name).click()
    tab.wait_for_timeout(300)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if tab_name == "Race":
        box = tab.locator("#race-player canvas").last.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["width"] > 100
