"""A headless Chromium that looks at a page, and tells what went wrong in it and whom it asked."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
PATIENCE_S = 900.0  # against hanging: the machine may be busy


@contextmanager
def browsing(url: str, width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """A browser that has loaded the page and got its first update."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    if width < 500:
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": {"width": width, "height": height}})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        driver.get(url)
        until(driver, lambda: driver.execute_script("return window.decentral?.cost.updates > 0"))
        yield driver
    finally:
        driver.quit()


def until(driver: Chrome, holds: Callable[[], object]) -> None:
    """Wait until that holds. Raises TimeoutException."""
    WebDriverWait(driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: holds())


def complaints(driver: Chrome) -> list[str]:
    """What the browser's console has: errors, warnings, breaches of the policy."""
    return [entry["message"] for entry in driver.get_log("browser")]  # type: ignore[no-untyped-call]


def hosts_asked(driver: Chrome) -> set[str]:
    """The hosts that the page has asked for anything, as the browser's network log says."""
    log = driver.get_log("performance")  # type: ignore[no-untyped-call]
    messages = [json.loads(entry["message"])["message"] for entry in log]
    asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    return {urlsplit(url).netloc for url in asked if urlsplit(url).scheme not in ("data", "blob")}
